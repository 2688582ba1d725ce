"""Reads an applied RayService or RayCluster and what runs of it, and says what has not come over.

Owns which objects belong together. Does not own what can be carried over: the slice provisioner
does (`autoscaling.provisioning.carry.compare`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoscaling.provisioning.carry.compare import carry_over, compare_clusters, outdated_pods
from deployments.kubectl import Kubectl

CLUSTER_LABEL = "ray.io/cluster"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """What runs. `cluster` and `service` are `None` where there is none of the name.

    `service` is `None` for a RayCluster without RayService as well. `pods` are the cluster's.
    `other_cluster` is the name of a second one that KubeRay is making or taking away. `is_promoted`
    is false while the only cluster of a RayService has yet to run the whole application once.
    """

    service: Json | None = None
    cluster: Json | None = None
    pods: tuple[Json, ...] = ()
    other_cluster: str | None = None
    is_promoted: bool = True


def read_running(kubectl: Kubectl, kind: str, name: str, namespace: str) -> RunningCluster:
    """Returns what runs of the RayService or RayCluster of this name.

    Raises:
        KubectlError: the cluster did not answer, or refused to.
    """
    service, other, cluster_name, is_promoted = None, None, name, True
    if kind == "RayService":
        service = kubectl.get("rayservices.ray.io", name, namespace)
        if service is None:
            return RunningCluster()
        status = service.get("status") or {}
        active, pending = (
            (status.get(which) or {}).get("rayClusterName") or None
            for which in ("activeServiceStatus", "pendingServiceStatus")
        )
        if active is None and pending is None:
            return RunningCluster(service=service)
        cluster_name = str(active or pending)
        other = pending if pending != cluster_name else None
        is_promoted = active is not None
    cluster = kubectl.get("rayclusters.ray.io", cluster_name, namespace)
    pods = kubectl.list_objects("pods", namespace, f"{CLUSTER_LABEL}={cluster_name}")
    return RunningCluster(service, cluster, tuple(pods), other, is_promoted)


def describe_applied(running: RunningCluster, name: str, namespace: str) -> Iterator[str]:
    """Yields in lines whether the cluster of a RayService has what was applied, and what it lacks.

    `running` was read of the RayService of this name.
    """
    if running.service is None:
        yield f"RayService {namespace}/{name}: there is none"
    elif running.cluster is None:
        yield f"RayService {namespace}/{name}: it has no cluster yet"
    else:
        cluster = running.cluster["metadata"]["name"]
        lines = list(not_come_over(running))
        verdict = "has not all that was applied:" if lines else "has all that was applied"
        yield f"RayService {namespace}/{name}: cluster {cluster} {verdict}"
        yield from (f"  {line}" for line in lines)


def not_come_over(running: RunningCluster) -> Iterator[str]:
    """Yields a line for each thing that was applied and that the running cluster has not."""
    if running.cluster is None:
        return
    if running.service is not None:
        wanted = running.service["spec"]["rayClusterConfig"]
        differs = compare_clusters(wanted, running.cluster, running.pods)
        if differs.changes or differs.hindrances:
            carry = carry_over(running.service, running.cluster, running.pods)
            for change in carry.changes:
                yield f"{change.subject}: {change.what}: not carried over yet"
            for hindrance in carry.hindrances:
                yield (
                    f"{hindrance.subject}: {hindrance.what}: {hindrance.reason}; "
                    f"what works: {hindrance.way}"
                )
    for subject, names in outdated_pods(running.cluster, running.pods).items():
        yield f"{subject}: {len(names)} pods are of an older template: {', '.join(names)}"
