"""Reads a pod as the API server has it: what an operator has to know when it does not serve.

Owns which fields matter. Does not own which slice a pod is of: `autoscaling.provisioning` does.
Pure. Times are wall-clock seconds since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from autoscaling.provisioning.raycluster import NODE_TYPE_LABEL, decode_worker_pod
from autoscaling.provisioning.sidecar.readings import (
    COMPONENT_LABEL,
    CONTROL,
    GATEWAY,
    HEAD,
    NAME_LABEL,
    REDIS,
    REDIS_NAME,
)
from serving.domain.supply.pods import PodPhase

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """The slice and host that a pod is. `replica` is KubeRay's, and tells two of a name apart."""

    group: str
    replica: str
    slice_name: str
    worker_id: int


@dataclass(frozen=True, slots=True)
class RestartReading:
    """The restarts of the container that restarted most; `at_s` is when it last began again.

    `reason` is how it ended before; `None` where the kubelet does not say.
    """

    container: str
    count: int
    at_s: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class PodReading:
    """One pod. `component` is `head`, `gateway`, `redis` or empty; `place` is of a slice's pods.

    `due_at_s` is when its end was due at the latest, once somebody wants its end. `since_s` is
    when it became ready, or ceased to be, or was made. `unschedulable` is the scheduler's reason
    for giving it no machine, `waiting` what keeps a container from starting, `reason` why it ended.
    """

    name: str
    component: str
    phase: PodPhase
    is_ready: bool
    since_s: float
    place: SlicePlace | None = None
    machine: str | None = None
    due_at_s: float | None = None
    finalizers: tuple[str, ...] = ()
    unschedulable: str | None = None
    waiting: str | None = None
    reason: str | None = None
    restart: RestartReading | None = None


def read_pod(pod: Json) -> PodReading:
    """Returns what there is to know of a pod of a RayCluster, or of its Redis.

    Raises:
        UnusableError: it is a worker's pod, and not as KubeRay makes them.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    ready, scheduled = conditions.get("Ready") or {}, conditions.get("PodScheduled") or {}
    component = _component(labels)
    worker = None
    if not component and labels.get(NODE_TYPE_LABEL) == "worker":
        worker = decode_worker_pod(msgspec.json.encode(pod))
    containers = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    since = ready.get("lastTransitionTime") or metadata.get("creationTimestamp")
    due = metadata.get("deletionTimestamp")
    return PodReading(
        name=str(metadata["name"]),
        component=component,
        phase=PodPhase(status.get("phase") or PodPhase.PENDING),
        is_ready=ready.get("status") == "True",
        since_s=0.0 if since is None else instant(since),
        place=None
        if worker is None
        else SlicePlace(worker.group, worker.replica, worker.slice_name, worker.host_index),
        machine=(pod.get("spec") or {}).get("nodeName"),
        due_at_s=None if due is None else instant(due),
        finalizers=tuple(metadata.get("finalizers") or ()),
        unschedulable=_unschedulable(scheduled),
        waiting=_hindrance(containers),
        reason=_end_of_pod(status, containers),
        restart=_restart(containers),
    )


def instant(text: str) -> float:
    """Returns a time of Kubernetes' as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def _component(labels: Json) -> str:
    if labels.get(NAME_LABEL) == REDIS_NAME:
        return REDIS
    if labels.get(NODE_TYPE_LABEL) == "head":
        return HEAD
    component = labels.get(COMPONENT_LABEL, "")
    return component if component in (GATEWAY, CONTROL) else ""


def _unschedulable(scheduled: Json) -> str | None:
    if scheduled.get("status") != "False":
        return None
    return str(scheduled.get("message") or scheduled.get("reason") or "no reason is given")


def _hindrance(containers: list[Json]) -> str | None:
    """Returns what keeps the first hindered container from starting, if it is not ordinary."""
    for each in containers:
        waiting = (each.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return ": ".join(filter(None, (reason, waiting.get("message"))))
    return None


def _end_of_pod(status: Json, containers: list[Json]) -> str | None:
    words = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
    if words:
        return words
    ends = ((each.get("state") or {}).get("terminated") for each in containers)
    return next((_end(end) for end in ends if end and end.get("exitCode")), None)


def _end(terminated: Json) -> str:
    return f"{terminated.get('reason') or 'Error'} (exit status {terminated.get('exitCode')})"


def _restart(containers: list[Json]) -> RestartReading | None:
    most = max(containers, key=lambda each: int(each.get("restartCount") or 0), default=None)
    if most is None or not most.get("restartCount"):
        return None
    running = (most.get("state") or {}).get("running") or {}
    before = (most.get("lastState") or {}).get("terminated")
    at = running.get("startedAt") or (before or {}).get("finishedAt")
    return RestartReading(
        str(most["name"]),
        int(most["restartCount"]),
        None if at is None else instant(at),
        None if before is None else _end(before),
    )
