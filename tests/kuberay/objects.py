"""RayClusters, RayServices and pods as KubeRay and GKE know them."""

import itertools
from typing import Any

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    HOST_INDEX_LABEL,
    NODE_TYPE_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
    WEBHOOK_SLICE_LABEL,
)
from serving.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    NEVER_IDLE_S,
)
from serving.topology import SliceShape

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
) -> dict[str, Any]:
    """A group of `spec.workerGroupSpecs`, as our manifests write it and Go serialises it."""
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
            "spec": {
                "nodeSelector": {
                    GKE_COMPUTE_CLASS: name,
                    GKE_ACCELERATOR: shape.gke_accelerator,
                    GKE_TOPOLOGY: shape.topology,
                },
                "containers": [{"name": "ray-worker", "resources": {"limits": limits}}],
            }
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


def replica_pods(group: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """The pods of a new replica, without nodes yet; named, numbered and labelled as on GKE."""
    name = group["groupName"]
    replica = f"{name}-{next(_numbers):05x}"
    labels = {
        CLUSTER_LABEL: RAYCLUSTER,
        NODE_TYPE_LABEL: "worker",
        GROUP_LABEL: name,
        REPLICA_NAME_LABEL: replica,
        REPLICA_INDEX_LABEL: str(index),
        WEBHOOK_SLICE_LABEL: f"{name}-{index}",
    }
    return [
        {
            "metadata": {
                "name": f"{RAYCLUSTER}-{name}-worker-{next(_numbers):05x}",
                "labels": labels | {HOST_INDEX_LABEL: str(host)},
            },
            "status": {"phase": "Pending"},
        }
        for host in range(group["numOfHosts"])
    ]


def running_container() -> dict[str, Any]:
    """The status of Ray's container while it runs."""
    return {"name": "ray-worker", "state": {"running": {}}}


def ended_container() -> dict[str, Any]:
    """The same once Ray's process has ended."""
    return {"name": "ray-worker", "state": {"terminated": {"exitCode": 1}}}
