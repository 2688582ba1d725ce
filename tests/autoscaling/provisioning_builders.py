"""Slices, replicas and worker groups in few words, and KubeRay's answer to a plan."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoscaling.provisioning.groups import SliceKind, WorkerGroup
from autoscaling.provisioning.plan import Change, ProvisioningPlan
from serving.domain.slice_lifecycle import SliceState
from serving.domain.supply.pods import GroupPods, ObservedPod, ObservedSlice, PodPhase
from serving.domain.supply.records import (
    SliceHolder,
    SupplyHost,
    SupplyRecord,
    SupplyReport,
    SupplyState,
    WaitingReplica,
)

SPOT = SliceKind("spot", "v6e", "2x4")
RESERVED = SliceKind("reserved", "v6e", "2x4")
_ids = itertools.count()


async def no_fence(_: ObservedSlice) -> str | None:
    """Lets every slice go."""
    return None


async def no_report(_: tuple[GroupPods, ...]) -> None:
    """Tells nobody of the pods."""


@dataclass(frozen=True)
class Said:
    """What the directory says of the slice `name`, wherever it is."""

    name: str
    state: SupplyState
    kind: SliceKind = SPOT
    holder: SliceHolder | None = None
    num_failures: int = 0
    until_s: float | None = None


Entry = Said | WaitingReplica


def waiting(
    kind: SliceKind = SPOT, *, num_slices: int = 1, zone: str | None = None, since_s: float = 0.0
) -> WaitingReplica:
    """A replica that has no slice yet."""
    return WaitingReplica(
        life_id=f"replica-{next(_ids)}",
        model="demo",
        compute_class=kind.compute_class,
        generation=kind.generation,
        topology=kind.topology,
        since_s=since_s,
        zone=zone,
        num_slices=num_slices,
    )


def holding(name: str, kind: SliceKind = SPOT) -> Said:
    """A replica whose engine runs on the slice `name`."""
    return Said(name, SupplyState.HELD, kind, _holder(kind, SliceState.READY))


def leaving(name: str, kind: SliceKind = SPOT) -> Said:
    """A replica whose slice will be taken away, as it has just learned."""
    holder = _holder(kind, SliceState.DRAINING, drain_deadline_s=130.0)
    return Said(name, SupplyState.CONDEMNED, kind, holder)


def released(name: str, kind: SliceKind = SPOT) -> Said:
    """A replica that drains because it is no longer wanted."""
    return Said(name, SupplyState.HELD, kind, _holder(kind, SliceState.DRAINING))


def condemned(name: str, kind: SliceKind = SPOT) -> Said:
    """A slice that goes, and that nobody has."""
    return Said(name, SupplyState.CONDEMNED, kind)


def leased(name: str, kind: SliceKind = SPOT) -> Said:
    """A slice whose chips are taken, nobody says by whom."""
    return Said(name, SupplyState.LEASED, kind)


def changing_hands(name: str, kind: SliceKind = SPOT) -> Said:
    """A slice that a replica takes or has left, and has not said so yet."""
    return Said(name, SupplyState.LEASED, kind, until_s=60.0)


def report_of(entries: Iterable[Entry], groups: Iterable[WorkerGroup]) -> SupplyReport:
    """The directory's report: what `entries` say, and of slices that they leave out nothing.

    Slices that no group has are such as were, and are gone from Kubernetes.
    """
    entries = tuple(entries)
    seen = {(group.kind, each.name): each.pods for group in groups for each in group.slices}
    return SupplyReport(
        "test:1",
        tuple(
            _record(each, seen.get((each.kind, each.name), (ObservedPod("gone", PodPhase.FAILED),)))
            for each in entries
            if isinstance(each, Said)
        ),
        tuple(each for each in entries if isinstance(each, WaitingReplica)),
    )


def _holder(
    kind: SliceKind, state: SliceState, drain_deadline_s: float | None = None
) -> SliceHolder:
    return SliceHolder(f"replica-{next(_ids)}", "demo", kind.compute_class, state, drain_deadline_s)


def _record(each: Said, pods: tuple[ObservedPod, ...]) -> SupplyRecord:
    return SupplyRecord(
        incarnation=pods[0].name if pods[0].name != "gone" else f"gone-{each.name}",
        name=each.name,
        state=each.state,
        reason="the test says so",
        since_s=0.0,
        compute_class=each.kind.compute_class,
        generation=each.kind.generation,
        topology=each.kind.topology,
        num_chips=8,
        hosts=tuple(SupplyHost(index, pod.name) for index, pod in enumerate(pods)),
        holder=each.holder,
        num_failures=each.num_failures,
        until_s=each.until_s,
    )


def observed(
    name: str,
    *phases: PodPhase,
    num_hosts: int = 2,
    address: str | None = None,
) -> ObservedSlice:
    """A slice as the provisioner sees it; running, unless `phases` of its pods say otherwise."""
    pods = tuple(
        ObservedPod(f"pod-{next(_ids)}", phase, address)
        for phase in phases or (PodPhase.RUNNING,) * num_hosts
    )
    return ObservedSlice(name, pods)


def group(
    *slices: ObservedSlice | str,
    replicas: int | None = None,
    kind: SliceKind = SPOT,
    max_replicas: int = 10,
    min_replicas: int = 0,
    doomed: tuple[str, ...] = (),
    num_hosts: int = 2,
    name: str | None = None,
    zone: str | None = None,
) -> WorkerGroup:
    """A worker group with these slices; asked for are as many, unless `replicas` says otherwise."""
    seen = tuple(observed(each) if isinstance(each, str) else each for each in slices)
    return WorkerGroup(
        name=name or f"{kind.compute_class}-group",
        kind=kind,
        replicas=len(seen) if replicas is None else replicas,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        num_hosts=num_hosts,
        slices=seen,
        pods_pending_deletion=frozenset(doomed),
        zone=zone,
    )


def carried_out(groups: list[WorkerGroup], plan: ProvisioningPlan) -> list[WorkerGroup]:
    """The groups once KubeRay and GKE have done everything that they are asked for."""
    changes = {change.group.name: change for change in plan.changes}
    return [_carried_out(each, changes.get(each.name)) for each in groups]


def _carried_out(each: WorkerGroup, change: Change | None) -> WorkerGroup:
    replicas = each.replicas if change is None else change.replicas
    dropped = {drop.slice.incarnation for drop in change.drops} if change else set()
    if change is None or not change.is_scaling:
        # What was named before goes first; nothing else happens meanwhile.
        dropped = {
            one.incarnation for one in each.slices if _pods(one) & each.pods_pending_deletion
        }
    after = replace(each, replicas=replicas, pods_pending_deletion=frozenset())
    left = tuple(one for one in each.lasting if one.incarnation not in dropped)
    taken = {one.name for one in left}
    free = (name for name in map("s-{}".format, itertools.count()) if name not in taken)
    new = tuple(
        observed(name, PodPhase.PENDING, PodPhase.PENDING)
        for name in itertools.islice(free, max(0, after.asked_for - len(left)))
    )
    return replace(after, slices=left + new)


def _pods(each: ObservedSlice) -> set[str]:
    return {pod.name for pod in each.pods}
