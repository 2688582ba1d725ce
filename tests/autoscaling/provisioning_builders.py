"""Records and worker groups in few words, and KubeRay's answer to a plan."""

import itertools
from dataclasses import replace

from autoscaling.provisioning.demand import SliceKind
from autoscaling.provisioning.groups import ObservedPod, ObservedSlice, PodPhase, WorkerGroup
from autoscaling.provisioning.plan import Change, ProvisioningPlan
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import HostRecord, SliceRecord, part_suffix

SPOT = SliceKind("spot", "v6e", "2x4")
RESERVED = SliceKind("reserved", "v6e", "2x4")
_ids = itertools.count()
_WAY = (SliceState.RESERVED, SliceState.LOADING, SliceState.READY)


async def no_fence(_: ObservedSlice) -> str | None:
    """Lets every slice go."""
    return None


def waiting(kind: SliceKind = SPOT) -> SliceRecord:
    """A replica that has no slice yet."""
    return SliceRecord(
        replica_id=f"replica-{next(_ids)}",
        model="demo",
        compute_class=kind.compute_class,
        life=SliceLifecycle.begin(0.0).enter(SliceState.PROVISIONING, 0.0, "none is free"),
        generation=kind.generation,
        topology=kind.topology,
    )


def joining(num_slices: int, kind: SliceKind = SPOT) -> list[SliceRecord]:
    """A replica that waits for so many slices at once: a record for each."""
    first = waiting(kind)
    return [
        replace(first, replica_id=f"{first.replica_id}{part_suffix(part)}", part=part)
        for part in range(num_slices)
    ]


def holding(name: str, kind: SliceKind = SPOT, *, address: str | None = None) -> SliceRecord:
    """A replica whose engine runs on the slice `name`."""
    record = waiting(kind)
    life = record.life
    for state in _WAY:
        life = life.enter(state, 0.0, "so it goes", slice_name=name)
    hosts = () if address is None else (HostRecord(0, "node", address, 4),)
    return replace(record, life=life, hosts=hosts)


def leaving(name: str, kind: SliceKind = SPOT) -> SliceRecord:
    """A replica whose slice will be taken away, as it has just learned."""
    record = holding(name, kind)
    life = record.life.enter(SliceState.DRAINING, 100.0, "preemption notice")
    return replace(record, life=life, drain_deadline_s=130.0)


def released(name: str, kind: SliceKind = SPOT) -> SliceRecord:
    """A replica that drains because it is no longer wanted."""
    return replace(leaving(name, kind), drain_deadline_s=None)


def gone(name: str, kind: SliceKind = SPOT) -> SliceRecord:
    """A replica whose slice is gone."""
    record = holding(name, kind)
    return replace(record, life=record.life.end(EndCause.PREEMPTED, 200.0, "it was taken"))


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
    mirrored: int | None = None,
    num_hosts: int = 2,
) -> WorkerGroup:
    """A worker group with these slices; asked for are as many, unless `replicas` says otherwise."""
    seen = tuple(observed(each) if isinstance(each, str) else each for each in slices)
    return WorkerGroup(
        name=f"{kind.compute_class}-group",
        kind=kind,
        replicas=len(seen) if replicas is None else replicas,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        num_hosts=num_hosts,
        slices=seen,
        pods_pending_deletion=frozenset(doomed),
        mirrored_replicas=mirrored,
    )


def carried_out(groups: list[WorkerGroup], plan: ProvisioningPlan) -> list[WorkerGroup]:
    """The groups once KubeRay and GKE have done everything that they are asked for."""
    changes = {change.group.name: change for change in plan.changes}
    return [_carried_out(each, changes.get(each.name)) for each in groups]


def _carried_out(each: WorkerGroup, change: Change | None) -> WorkerGroup:
    replicas = each.replicas if change is None else change.replicas
    dropped = {drop.slice.incarnation for drop in change.drops} if change else set()
    mirrored = None if each.mirrored_replicas is None else replicas
    if change is None or not change.is_scaling:
        # What was named before goes first; nothing else happens meanwhile.
        dropped = {
            one.incarnation for one in each.slices if _pods(one) & each.pods_pending_deletion
        }
    after = replace(
        each, replicas=replicas, pods_pending_deletion=frozenset(), mirrored_replicas=mirrored
    )
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
