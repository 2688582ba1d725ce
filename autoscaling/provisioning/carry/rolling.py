"""Chooses the slices that are replaced because their group has another template now. Pure.

KubeRay makes new pods from the template as it stands and leaves those that run alone. So a new
image comes slice by slice: one slice of a group is given up, its replica drains it and moves its
streams, and what KubeRay makes in its place is of the new template. The next one follows once every
slice of the group is there again, and every engine on them is ready: a template with which no host
comes up, or no engine, costs one slice. Slices on which no engine serves do not wait for engines.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum

from autoscaling.provisioning.groups import WorkerGroup
from serving.domain.slice_lifecycle import SliceState
from serving.domain.supply.pods import ObservedSlice, PodPhase
from serving.domain.supply.records import SupplyRecord, SupplyState

REASON = "its pods are of an older template"
# The states in which a slice is there. Nobody could be asked to leave a leased one.
_THERE = (SupplyState.QUARANTINED, SupplyState.FREE, SupplyState.HELD, SupplyState.LEASED)
_COMING = (SliceState.RESERVED, SliceState.PROBING, SliceState.LOADING)


class _Cost(IntEnum):
    """What is lost with a slice that is given up, the least first."""

    FAILED = 0  # it is in quarantine
    UNUSED = 1
    LOADING = 2  # an engine starts on it
    SERVING = 3


def replaced_now(
    groups: Iterable[WorkerGroup],
    by_slice: Mapping[str, SupplyRecord],
    replacing: Mapping[str, str],
    num_waiting: Mapping[str, int],
) -> dict[str, str]:
    """Returns the slices to replace now, by incarnation, with the reason.

    `replacing` was returned last: what is being replaced stays so until it is gone. Slices that
    have no machine yet are replaced all at once, which costs nothing. `num_waiting` is how many
    slices of a group replicas wait for, by its name.
    """
    chosen: dict[str, str] = {}
    for group in groups:
        is_waited_for = num_waiting.get(group.name, 0) > 0
        for each in _replaced_of(group, by_slice, replacing, is_waited_for=is_waited_for):
            chosen[each.incarnation] = REASON
    return chosen


def _replaced_of(
    group: WorkerGroup,
    by_slice: Mapping[str, SupplyRecord],
    replacing: Mapping[str, str],
    *,
    is_waited_for: bool,
) -> list[ObservedSlice]:
    outdated = [each for each in group.lasting if each.is_outdated]
    begun = [each for each in outdated if each.incarnation in replacing]
    unfounded = [each for each in outdated if _is_unfounded(each)]
    if begun or unfounded or not outdated:
        return [*begun, *(each for each in unfounded if each not in begun)]
    records = [by_slice.get(each.incarnation) for each in group.lasting]
    is_there = all(record is not None and record.state in _THERE for record in records)
    if len(records) < group.asked_for or not is_there or group.pods_pending_deletion:
        return []
    costs = {each.incarnation: _cost(by_slice[each.incarnation]) for each in group.lasting}
    able = [
        (cost, each.name, each)
        for each in outdated
        if (cost := costs[each.incarnation]) is not None
    ]
    if not able:
        return []
    cost, _, cheapest = min(able, key=lambda one: one[:2])
    if cost == _Cost.SERVING and _is_missed(costs.values(), is_waited_for=is_waited_for):
        return []
    return [cheapest]


def _cost(record: SupplyRecord) -> _Cost | None:
    """Returns what is lost with a slice that is there; `None`: it cannot be given up now."""
    if record.state == SupplyState.QUARANTINED:
        return _Cost.FAILED
    if record.state == SupplyState.FREE:
        return _Cost.UNUSED
    if record.holder is None:
        return None
    if record.holder.state in _COMING:
        return _Cost.LOADING
    return _Cost.SERVING if record.holder.state == SliceState.READY else None


def _is_missed(costs: Iterable[_Cost | None], *, is_waited_for: bool) -> bool:
    """Returns whether an engine is still to come on a slice of the group, or has just gone."""
    idle = (_Cost.FAILED, _Cost.UNUSED)
    return any(is_waited_for if cost in idle else cost != _Cost.SERVING for cost in costs)


def _is_unfounded(each: ObservedSlice) -> bool:
    return all(pod.machine is None and pod.phase == PodPhase.PENDING for pod in each.pods)
