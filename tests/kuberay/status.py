"""What KubeRay says in the status of a RayCluster and of a RayService. Pure."""

from collections.abc import Sequence
from typing import Any

from autoscaling.provisioning.raycluster import NODE_TYPE_LABEL
from serving.domain.names.gke_names import GKE_CHIPS

from .quantities import cores, in_gibibytes, num_bytes
from .ray_pods import head_service
from .ray_services import head_ports
from .worker_groups import wanted_slices

Json = dict[str, Any]

_NOTHING = {
    "desiredCPU": "0",
    "desiredGPU": "0",
    "desiredMemory": "0",
    "desiredTPU": "0",
    "head": {},
}


def cluster_status(cluster: Json, pods: Sequence[Json], failure: str | None, now: str) -> Json:
    """The status after a look. `failure` is the error that ended the look; `None` if none did.

    `now` is the time as Kubernetes writes it. Where nothing has changed the old times stay.
    """
    old = cluster.get("status", {})
    spec, groups = cluster["spec"], cluster["spec"].get("workerGroupSpecs", ())
    workers = [pod for pod in pods if pod["metadata"]["labels"][NODE_TYPE_LABEL] == "worker"]
    hosts = [group.get("numOfHosts", 1) for group in groups]
    status = {
        "availableWorkerReplicas": sum(_is_running(pod) for pod in workers),
        "readyWorkerReplicas": sum(is_ready(pod) for pod in workers),
        "desiredWorkerReplicas": _total(hosts, [wanted_slices(group) for group in groups]),
        "minWorkerReplicas": _total(hosts, [group.get("minReplicas") or 0 for group in groups]),
        "maxWorkerReplicas": _total(hosts, [group["maxReplicas"] for group in groups]),
        "observedGeneration": cluster["metadata"]["generation"],
        "endpoints": {name: str(port) for name, port in head_ports(cluster).items()},
        "head": _head(cluster, pods),
        **_desired(spec),
    }
    is_whole = failure is None and bool(pods) and all(is_ready(pod) for pod in pods)
    status["conditions"] = _cluster_conditions(old, pods, failure, is_whole, now)
    if is_whole or "state" in old:
        status["state"] = "ready"
        status["stateTransitionTimes"] = old.get("stateTransitionTimes", {"ready": now})
    # A new count alone, which changes nothing else, is not told.
    untold = {"lastUpdateTime", "observedGeneration", *_desired(spec)}
    if {name for name in {*old, *status} if old.get(name) != status.get(name)} <= untold:
        return old
    return status | {"lastUpdateTime": now}


def service_status(
    service: Json, active: Json, pending: Json, num_endpoints: int, now: str
) -> Json:
    """The status of a RayService whose clusters are `active` and `pending`; empty where none is."""
    old = service.get("status", {})
    generation = service["metadata"]["generation"]
    serves = bool(active) and num_endpoints > 0
    ready = "NonZeroServeEndpoints" if serves else "ZeroServeEndpoints"
    upgrading = "BothActivePendingClustersExist" if pending else "NoPendingCluster"
    if not active:
        ready = upgrading = "Initializing"
    conditions = [
        _condition(old, "Ready", is_so=serves, reason=ready, now=now),
        _condition(
            old, "UpgradeInProgress", is_so=bool(active and pending), reason=upgrading, now=now
        ),
    ]
    status = {
        "activeServiceStatus": active or {"rayClusterStatus": _NOTHING},
        "pendingServiceStatus": pending or {"rayClusterStatus": _NOTHING},
        "conditions": [each | {"observedGeneration": generation} for each in conditions],
        "observedGeneration": generation,
    }
    if active:
        status["numServeEndpoints"] = num_endpoints
    if serves:
        status["serviceStatus"] = "Running"
    if _told(old) == _told(status):
        return old
    return status | {"lastUpdateTime": now}


def _told(status: Json) -> Json:
    """What of a RayService's status is news: of a cluster's, where its head is."""
    found = {name: value for name, value in status.items() if name != "lastUpdateTime"}
    for part in ("activeServiceStatus", "pendingServiceStatus"):
        copied = status.get(part, {}).get("rayClusterStatus") or {}
        news = {name: copied.get(name) for name in ("head", "endpoints")}
        found[part] = status.get(part, {}) | {"rayClusterStatus": news}
    return found


def is_ready(pod: Json) -> bool:
    """Whether a pod runs and takes traffic."""
    conditions = pod["status"].get("conditions", ())
    return _is_running(pod) and any(
        (each["type"], each["status"]) == ("Ready", "True") for each in conditions
    )


def _total(hosts: Sequence[int], slices: Sequence[int]) -> int:
    return sum(num * count for num, count in zip(hosts, slices, strict=True))


def _desired(spec: Json) -> Json:
    """The sum of what is asked for, by the counts as they were written: no bound applies."""
    asked = [(1, spec["headGroupSpec"])] + [
        ((group.get("replicas") or 0) * group.get("numOfHosts", 1), group)
        for group in spec.get("workerGroupSpecs", ())
    ]
    limits = [
        (count, group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {}))
        for count, group in asked
    ]

    def total(name: str) -> int:
        return int(sum(count * cores(found.get(name, "0")) for count, found in limits))

    memory = sum(count * num_bytes(found.get("memory", "0")) for count, found in limits)
    return {
        "desiredCPU": str(total("cpu")),
        "desiredGPU": "0",
        "desiredMemory": in_gibibytes(memory),
        "desiredTPU": str(total(GKE_CHIPS)),
    }


def _head(cluster: Json, pods: Sequence[Json]) -> Json:
    for pod in pods:
        if pod["metadata"]["labels"][NODE_TYPE_LABEL] == "head":
            found = {
                "podName": pod["metadata"]["name"],
                "podIP": pod["status"].get("podIP"),
                # The Service before the head has no address of its own.
                "serviceIP": pod["status"].get("podIP"),
                "serviceName": head_service(cluster),
            }
            return {name: value for name, value in found.items() if value}
    return {"serviceName": head_service(cluster)}


def _cluster_conditions(
    old: Json, pods: Sequence[Json], failure: str | None, is_whole: bool, now: str
) -> list[Json]:
    heads = [pod for pod in pods if pod["metadata"]["labels"][NODE_TYPE_LABEL] == "head"]
    has_head = any(is_ready(pod) for pod in heads)
    was_whole = any(
        (each["type"], each["status"]) == ("RayClusterProvisioned", "True")
        for each in old.get("conditions", ())
    )
    # Whatever exists has to run once; what could not be made does not count.
    is_provisioned = was_whole or is_whole or (bool(pods) and all(map(is_ready, pods)))
    provisioned = (
        "AllPodRunningAndReadyFirstTime" if is_provisioned else "RayClusterPodsProvisioning"
    )
    head = (
        "HeadPodRunningAndReady"
        if has_head
        else "HeadPodNotFound"
        if not heads
        else "HeadPodNotReady"
    )
    found = [
        _condition(old, "HeadPodReady", is_so=has_head, reason=head, now=now),
        _condition(old, "RayClusterProvisioned", is_so=is_provisioned, reason=provisioned, now=now),
        _condition(old, "RayClusterSuspended", is_so=False, reason="RayClusterSuspended", now=now),
        _condition(
            old, "RayClusterSuspending", is_so=False, reason="RayClusterSuspending", now=now
        ),
    ]
    if failure is not None:
        reason = "FailedCreateWorkerPod"
        failed = _condition(old, "ReplicaFailure", is_so=True, reason=reason, now=now)
        found.insert(0, failed | {"message": f"{reason}\n{failure}"})
    return found


def _condition(old: Json, name: str, *, is_so: bool, reason: str, now: str) -> Json:
    status = "True" if is_so else "False"
    before = next((each for each in old.get("conditions", ()) if each["type"] == name), None)
    changed = now if before is None or before["status"] != status else before["lastTransitionTime"]
    return {
        "type": name,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": changed,
    }


def _is_running(pod: Json) -> bool:
    return bool(pod["status"].get("phase") == "Running")
