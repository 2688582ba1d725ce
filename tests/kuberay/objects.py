"""RayClusters, RayServices and pods as KubeRay and GKE know them."""

import itertools
from collections.abc import Iterable
from typing import Any

from autoscaling.provisioning.raycluster import (
    REPLICA_NAME_LABEL,
)
from serving.domain.names.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
    NEVER_IDLE_S,
)
from serving.domain.topology import SliceShape

from .ray_pods import worker_pod
from .webhook import admitted

RAYCLUSTER = "llm-tpu-raycluster"
RAYSERVICE = "llm-tpu"
HEAD_ACCOUNT = "llm-tpu-head"

_numbers = itertools.count()


def worker_group(
    name: str,
    shape: SliceShape,
    compute_class: str,
    *,
    max_replicas: int,
    min_replicas: int = 0,
    idle_timeout_s: int = NEVER_IDLE_S,
    has_host_index: bool = True,
) -> dict[str, Any]:
    """A group of `spec.workerGroupSpecs`, as our manifests write it and Go serialises it.

    `has_host_index` of false leaves out what they say to the TPU webhook of slices of one host.
    """
    is_single = shape.num_hosts == 1
    limits = {GKE_CHIPS: str(shape.chips_per_host), "cpu": "1", "memory": "1Gi"}
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": min_replicas,
        "maxReplicas": max_replicas,
        "numOfHosts": shape.num_hosts,
        "idleTimeoutSeconds": idle_timeout_s,
        # Go writes the empty struct; Ray's provider replaces it and fails if it is not there.
        "scaleStrategy": {},
        "rayStartParams": {},
        "labels": {
            COMPUTE_CLASS_LABEL: compute_class,
            "ray.io/market-type": compute_class,
            "ray.io/tpu-pod-type": shape.ray_pod_type,
            "ray.io/tpu-topology": shape.topology,
            "ray.io/accelerator-type": shape.ray_accelerator_type,
        },
        "template": {
            "metadata": {"labels": {HOST_INDEX_LABEL: "0"} if is_single and has_host_index else {}},
            "spec": {
                "nodeSelector": {
                    GKE_COMPUTE_CLASS: name,
                    GKE_ACCELERATOR: shape.gke_accelerator,
                    GKE_TOPOLOGY: shape.topology,
                },
                # As GKE adds them to pods that ask for chips.
                "tolerations": [{"key": GKE_CHIPS, "operator": "Exists"}],
                "containers": [
                    {"name": "ray-worker", "image": "none", "resources": {"limits": limits}}
                ],
            },
        },
    }


def raycluster(
    *groups: dict[str, Any],
    idle_timeout_s: int = 60,
    has_autoscaler: bool = True,
    is_of_service: bool = False,
) -> dict[str, Any]:
    """A RayCluster with these worker groups."""
    limits = {"limits": {"cpu": "1", "memory": "1Gi"}}
    head = {"name": "ray-head", "image": "none", "resources": limits}
    metadata: dict[str, Any] = {"name": RAYCLUSTER, "namespace": "serving"}
    if is_of_service:
        owner = {"apiVersion": "ray.io/v1", "kind": "RayService", "name": RAYSERVICE, "uid": "1"}
        metadata["ownerReferences"] = [owner | {"controller": True}]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata,
        "spec": {
            "rayVersion": "2.60.0",
            "enableInTreeAutoscaling": has_autoscaler,
            "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": idle_timeout_s},
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "1"},
                "template": {"spec": {"serviceAccountName": HEAD_ACCOUNT, "containers": [head]}},
            },
            "workerGroupSpecs": list(groups),
        },
    }


def rayservice(
    cluster: dict[str, Any], *, active: str = RAYCLUSTER, pending: str = ""
) -> dict[str, Any]:
    """The RayService that made `cluster`, and which clusters it has now."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": RAYSERVICE, "namespace": "serving"},
        "spec": {"rayClusterConfig": cluster["spec"]},
        "status": {
            "activeServiceStatus": {"rayClusterName": active},
            "pendingServiceStatus": {"rayClusterName": pending} if pending else {},
        },
    }


def replica_pods(
    group: dict[str, Any], index: int, others: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The pods of a new replica, without nodes yet, as KubeRay and the TPU webhook make them.

    `others` are the group's pods that stay, which the webhook looks at.
    """
    cluster = raycluster(group)
    cluster["metadata"]["uid"] = "1"
    num_hosts = group["numOfHosts"]
    replica = f"{group['groupName']}-{next(_numbers):05x}" if num_hosts > 1 else None
    pods = []
    for host in range(num_hosts):
        pod = admitted(worker_pod(cluster, group, index, host, replica), others)
        prefix = pod["metadata"].pop("generateName")
        pod["metadata"]["name"] = f"{prefix}{next(_numbers):05x}"
        pods.append(pod | {"status": {"phase": "Pending"}})
    return pods


def replica_of(pod: dict[str, Any]) -> str:
    """The replica, which is a slice, that a pod is of: its own name where it is the only one."""
    return str(pod["metadata"]["labels"].get(REPLICA_NAME_LABEL, pod["metadata"]["name"]))
