"""Reads a RayCluster and what stands around it through kubectl, all parts at once.

Owns what is asked for, and that a part which may not be read does not hide the others. Does not own
what it means (`findings`).
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autoscaling.provisioning.errors import UnusableError
from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.raycluster import decode_worker_pod, read_groups
from autoscaling.provisioning.sidecar.readings import (
    INSTANCE_LABEL,
    NAME_LABEL,
    REDIS_NAME,
    SUSPENDED,
    ClusterWish,
    QuotaUse,
    read_cluster,
    read_quota,
)
from deployments.applied import RunningCluster, read_running
from deployments.kubectl import Kubectl, KubectlError
from deployments.status.cluster.pods import PodReading, instant, read_pod
from serving.domain.names.gke_names import GKE_ACCELERATOR, GKE_COMPUTE_CLASS

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SuspendedRule:
    """A rule of a ComputeClass by which GKE makes no machines for now, and why."""

    reason: str
    since_s: float | None


@dataclass(frozen=True, slots=True)
class ClassReading:
    """A ComputeClass: how many rules it has in its status, and those that GKE has suspended."""

    name: str
    num_rules: int
    suspended: tuple[SuspendedRule, ...]


@dataclass(frozen=True, slots=True)
class ClusterWarning:
    """The last warning that the KubeRay operator wrote about the cluster."""

    reason: str
    message: str
    at_s: float | None


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """What the cluster says. A part that could not be read is `None`; `problems` says why.

    `name` is the RayCluster's; `None` where there is none (yet), and then nothing else is known.
    `target` is what was asked for, such as `RayService serving/llm`. `classes_of_groups` has the
    ComputeClass that each worker group selects. `machines` are the TPU hosts: whether each is
    ready. `notes` say why the provisioner does not use a group.
    """

    target: str
    namespace: str
    name: str | None = None
    other_cluster: str | None = None
    pods: tuple[PodReading, ...] = ()
    groups: tuple[WorkerGroup, ...] = ()
    notes: tuple[str, ...] = ()
    wish: ClusterWish | None = None
    classes_of_groups: Mapping[str, str] = field(default_factory=dict)
    quotas: tuple[QuotaUse, ...] | None = None
    classes: tuple[ClassReading, ...] | None = None
    machines: Mapping[str, bool] | None = None
    warnings: tuple[ClusterWarning, ...] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)


def read_around(
    kubectl: Kubectl, running: RunningCluster, kind: str, name: str, namespace: str
) -> ClusterReading:
    """Returns the reading of the cluster in `running`, with what stands around it.

    Raises:
        UnusableError: cluster or pods are not as KubeRay makes them.
    """
    target = f"{kind} {namespace}/{name}"
    if running.cluster is None:
        return ClusterReading(target, namespace)
    cluster = running.cluster
    groups, notes = read_groups(cluster, map(decode_worker_pod, _workers(running.pods)))
    wish = read_cluster(msgspec.Raw(msgspec.json.encode(cluster)))
    specs = cluster["spec"].get("workerGroupSpecs") or ()
    classes_of_groups = {each["groupName"]: _class_of(each) for each in specs}
    parts, problems = _read_parts(kubectl, cluster, namespace, wish.classes)
    redis = parts.get("redis") or ()
    return ClusterReading(
        target=target,
        namespace=namespace,
        name=cluster["metadata"]["name"],
        other_cluster=running.other_cluster,
        pods=tuple(map(read_pod, (*running.pods, *redis))),
        groups=tuple(groups),
        notes=tuple(notes),
        wish=wish,
        classes_of_groups={name: found for name, found in classes_of_groups.items() if found},
        quotas=parts.get("resourcequotas"),
        classes=parts.get("computeclasses"),
        machines=parts.get("nodes"),
        warnings=parts.get("events"),
        problems=problems,
    )


def read_cluster_of(
    kubectl: Kubectl, kind: str, name: str, namespace: str
) -> tuple[ClusterReading, RunningCluster]:
    """Returns the reading of a RayService or RayCluster, and the objects that it was made from.

    Raises:
        KubectlError: the cluster did not answer, or refused to tell even of cluster and pods.
    """
    running = read_running(kubectl, kind, name, namespace)
    try:
        return read_around(kubectl, running, kind, name, namespace), running
    except UnusableError as error:
        raise KubectlError(f"{kind} {namespace}/{name}: {error}") from error


def _read_parts(
    kubectl: Kubectl, cluster: Json, namespace: str, classes: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads what the cluster is not: each part, or why it could not be read."""
    named = cluster["metadata"]["name"]
    head = cluster["spec"]["headGroupSpec"]["template"].get("metadata") or {}
    # Of another installation in the namespace is nothing to be told.
    installation = (head.get("labels") or {}).get(INSTANCE_LABEL)
    redis = f"{NAME_LABEL}={REDIS_NAME}"
    if installation is not None:
        redis += f",{INSTANCE_LABEL}={installation}"
    of_cluster = f"involvedObject.kind=RayCluster,involvedObject.name={named},type=Warning"
    ways: dict[str, Callable[[], Any]] = {
        "redis": lambda: kubectl.list_objects("pods", namespace, redis),
        "resourcequotas": lambda: tuple(
            use
            for each in kubectl.list_objects("resourcequotas", namespace)
            for use in read_quota(msgspec.Raw(msgspec.json.encode(each)))
        ),
        "computeclasses": lambda: _read_classes(
            kubectl.list_objects("computeclasses.cloud.google.com"), frozenset(classes)
        ),
        "nodes": lambda: _read_machines(kubectl.list_objects("nodes", selector=GKE_ACCELERATOR)),
        "events": lambda: _read_events(
            kubectl.list_objects("events", namespace, fields=of_cluster)
        ),
    }
    parts, problems = {}, {}
    with ThreadPoolExecutor(len(ways)) as pool:
        asked = {part: pool.submit(way) for part, way in ways.items()}
        for part, answer in asked.items():
            try:
                parts[part] = answer.result()
            except (KubectlError, UnusableError) as error:
                problems[part] = f"{error}"
    return parts, problems


def _workers(pods: Iterable[Json]) -> list[bytes]:
    """Returns the pods of slices and gateways, which the worker groups have made."""
    workers = (each for each in pods if _labels(each).get("ray.io/node-type") == "worker")
    return [msgspec.json.encode(each) for each in workers]


def _labels(body: Json) -> Json:
    return body["metadata"].get("labels") or {}


def _class_of(group: Json) -> str | None:
    selector = group["template"]["spec"].get("nodeSelector") or {}
    found: str | None = selector.get(GKE_COMPUTE_CLASS)
    return found


def _read_classes(bodies: Iterable[Json], ours: frozenset[str]) -> tuple[ClassReading, ...]:
    """Reads the classes that the RayCluster names; others in the cluster have classes too."""
    return tuple(_read_class(body) for body in bodies if body["metadata"]["name"] in ours)


def _read_class(body: Json) -> ClassReading:
    rules = (body.get("status") or {}).get("priorityStatuses") or ()
    suspended = [
        SuspendedRule(
            ": ".join(filter(None, (condition.get("reason"), condition.get("message")))),
            None if (at := condition.get("lastTransitionTime")) is None else instant(at),
        )
        for rule in rules
        for condition in rule.get("conditions") or ()
        if condition.get("type") == SUSPENDED and condition.get("status") == "True"
    ]
    return ClassReading(body["metadata"]["name"], len(rules), tuple(suspended))


def _read_machines(bodies: Iterable[Json]) -> dict[str, bool]:
    return {
        body["metadata"]["name"]: any(
            (each["type"], each["status"]) == ("Ready", "True")
            for each in (body.get("status") or {}).get("conditions") or ()
        )
        for body in bodies
    }


def _read_events(bodies: Iterable[Json]) -> tuple[ClusterWarning, ...]:
    """Returns the warnings about the cluster, the latest first."""
    found = [
        ClusterWarning(str(body.get("reason", "")), str(body.get("message", "")), _when(body))
        for body in bodies
    ]
    return tuple(sorted(found, key=lambda each: each.at_s or 0.0, reverse=True))


def _when(event: Json) -> float | None:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((instant(at) for at in times if at), None)
