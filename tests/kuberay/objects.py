"""RayClusters, RayServices and pods as KubeRay and GKE know them."""

import itertools
from collections.abc import Iterable
from typing import Any

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_TYPE_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
)
from serving.domain.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
    NEVER_IDLE_S,
)
from serving.domain.topology import SliceShape

from .webhook import admit

RAYCLUSTER = "llm-tpu-raycluster"
RAYSERVICE = "llm-tpu"
HEAD_POD = f"{RAYCLUSTER}-head"

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
                "containers": [{"name": "ray-worker", "resources": {"limits": limits}}],
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
    head = {"name": "ray-head", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
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
                "template": {"spec": {"containers": [head]}},
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


def head_pod() -> dict[str, Any]:
    """The pod of the head, which runs."""
    labels = {CLUSTER_LABEL: RAYCLUSTER, NODE_TYPE_LABEL: "head", GROUP_LABEL: "headgroup"}
    status = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [running_container()]}
    return {"metadata": {"name": HEAD_POD, "labels": labels}, "status": status}


def replica_pods(
    group: dict[str, Any], index: int, others: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The pods of a new replica, without nodes yet; named, numbered and labelled as on GKE.

    `others` are the group's pods that stay, which the TPU webhook looks at.
    """
    name, num_hosts = group["groupName"], group["numOfHosts"]
    labels = group["template"].get("metadata", {}).get("labels", {}) | {
        CLUSTER_LABEL: RAYCLUSTER,
        NODE_TYPE_LABEL: "worker",
        GROUP_LABEL: name,
        REPLICA_INDEX_LABEL: str(index),
    }
    replica = f"{name}-{next(_numbers):05x}"
    pods = []
    for host in range(num_hosts):
        # Of a slice of one host KubeRay says neither.
        several = {REPLICA_NAME_LABEL: replica, HOST_INDEX_LABEL: str(host)}
        pod = {
            "metadata": {
                "name": f"{RAYCLUSTER}-{name}-worker-{next(_numbers):05x}",
                "labels": labels | (several if num_hosts > 1 else {}),
            },
            "spec": {"containers": [{"name": "ray-worker"}]},
            "status": {"phase": "Pending"},
        }
        admit(pod, others)
        pods.append(pod)
    return pods


def replica_of(pod: dict[str, Any]) -> str:
    """The replica, which is a slice, that a pod is of: its own name where it is the only one."""
    return str(pod["metadata"]["labels"].get(REPLICA_NAME_LABEL, pod["metadata"]["name"]))


def running_container() -> dict[str, Any]:
    """The status of Ray's container while it runs."""
    return {"name": "ray-worker", "state": {"running": {}}}


def ended_container() -> dict[str, Any]:
    """The same once Ray's process has ended."""
    return {"name": "ray-worker", "state": {"terminated": {"exitCode": 1}}}
