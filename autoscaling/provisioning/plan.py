"""Compares demand with what exists and plans the changes: how many slices, and which of them go.

Owns every rule of adding and dropping slices. Does not own the demand (`demand`), the check that a
slice is free when it is dropped (`fence`), nor how a change is made (a `Provisioner`). Pure:
no clock, no I/O, no chance. What has to be remembered from one plan to the next comes in and goes
out as `PlannerState`; to forget it costs time, never a slice that a replica has.

The rules:

1. A slice that somebody has is never dropped.
2. Slices are dropped by name, and the count never falls below those that are not named. (A fallen
   count without names would leave the choice to others.)
3. A condemned slice is no supply. It is dropped as soon as nobody has it; where as many slices are
   needed as before, the count stays, and KubeRay makes another one in its place.
4. Any other slice is dropped once it has been unwanted for `idle_s`, and one that nobody has found
   machines for once it has been unwanted for `PENDING_IDLE_S`: it costs nothing but its place.
5. The count stays between the group's bounds; what they refuse is reported. Slices that one replica
   joins are requested together or not at all.
6. While pods that were named for deletion are still there, nothing changes: Ray's provider waits
   for the same.
7. Two changes of a group are `min_change_interval_s` apart.
8. While an operator has frozen scaling down, nothing is dropped by rule 4.
9. Slices whose pods are of an older template are replaced, one of a group at a time
   (`carry.rolling`).
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoscaling.provisioning.carry.rolling import replaced_now
from autoscaling.provisioning.demand import (
    SliceDemand,
    demands_of,
    is_condemned,
    records_by_slice,
)
from autoscaling.provisioning.groups import WorkerGroup
from serving.domain.slice_records import LEASE_S
from serving.domain.supply.pods import ObservedSlice, PodPhase
from serving.domain.supply.records import SupplyRecord, SupplyReport, SupplyState

# After this a slice that was asked for in vain is given up, if nobody wants it any more. Longer
# than a directory or a replica takes to come back.
PENDING_IDLE_S = 30.0
# A group that has not found machines for so long is dry: who waits is counted in another group of
# the kind, if there is one. Longer than GKE takes for a node pool that it can have (3 to 5 min).
DRY_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class ProvisioningRules:
    """The delays of a plan, in seconds.

    Raises:
        ValueError: `idle_s` is shorter than a lease. A directory that restarts knows of no replica
            for that long, and every slice would appear idle.
    """

    idle_s: float = 120.0
    min_change_interval_s: float = 5.0

    def __post_init__(self) -> None:
        if self.idle_s < LEASE_S:
            raise ValueError(f"idle_s is {self.idle_s:g}; allowed: at least {LEASE_S:g}, one lease")
        if self.min_change_interval_s < 0:
            raise ValueError(f"min_change_interval_s is {self.min_change_interval_s:g}; at least 0")


@dataclass(frozen=True, slots=True)
class PlannerState:
    """The memory that one plan passes to the next; times as its caller counts them, in seconds.

    `unwanted_since_s` and `pending_since_s` are by incarnation, `changed_at_s` by group.
    `replacing` are the slices, by incarnation, that are being replaced because their pods are of an
    older template, with what their replicas are told.
    """

    unwanted_since_s: Mapping[str, float] = field(default_factory=dict)
    pending_since_s: Mapping[str, float] = field(default_factory=dict)
    changed_at_s: Mapping[str, float] = field(default_factory=dict)
    replacing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drop:
    """The slice to be dropped. `is_condemned`: it goes whether it is wanted or not."""

    slice: ObservedSlice
    is_condemned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one group: it gets `replicas` in all, without the slices of `drops`.

    `num_made` of the slices that it gets are to take the place of dropped ones.
    """

    group: WorkerGroup
    replicas: int
    drops: tuple[Drop, ...]
    reason: str
    num_made: int = 0

    @property
    def is_scaling(self) -> bool:
        """Returns whether anything changes."""
        return self.replicas != self.group.replicas or bool(self.drops)

    def keeping(self, kept: Container[str]) -> "Change | None":
        """The change without the drops of these slices; `None` if nothing is left of it."""
        drops = tuple(drop for drop in self.drops if drop.slice.incarnation not in kept)
        if drops == self.drops:
            return self
        num_kept = len(self.drops) - len(drops)
        # What is kept needs a place in the count, and is made by nobody.
        replicas = self.replicas + max(0, num_kept - self.num_made)
        # Where fewer slices were asked for than exist, keeping one must not ask for more.
        replicas = min(replicas, max(self.group.replicas, self.group.max_replicas))
        num_made = max(0, self.num_made - num_kept)
        less = replace(self, replicas=replicas, drops=drops, num_made=num_made)
        return less if less.is_scaling else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The change that is not made, and why. `about` is a group or a kind of slice."""

    about: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProvisioningPlan:
    """The changes to make now, additions first; what was refused; what the next plan must know."""

    changes: tuple[Change, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    state: PlannerState = field(default_factory=PlannerState)

    def keeping(self, kept: Mapping[str, str]) -> "ProvisioningPlan":
        """Returns the plan without drops of `kept`, which has the reason of each by incarnation."""
        refusals = list(self.refusals)
        for change in self.changes:
            for drop in change.drops:
                if reason := kept.get(drop.slice.incarnation):
                    text = f"{drop.slice.name} is not dropped: {reason}"
                    refusals.append(Refusal(change.group.name, text))
        changes = (change.keeping(kept) for change in self.changes)
        return ProvisioningPlan(
            tuple(change for change in changes if change is not None), tuple(refusals), self.state
        )


def plan_slices(
    report: SupplyReport,
    groups: Iterable[WorkerGroup],
    rules: ProvisioningRules,
    now_s: float,
    state: PlannerState,
) -> ProvisioningPlan:
    """The changes that bring `groups` to what the replicas in `report` need, as far as `rules` go.

    `now_s` is on the clock of `state`. A group without any request is brought down to its minimum.
    """
    groups = sorted(groups, key=lambda group: (group.kind, group.name))
    by_slice = records_by_slice(report, groups)
    pending_since_s = {
        each.incarnation: state.pending_since_s.get(each.incarnation, now_s)
        for group in groups
        for each in group.lasting
        if is_pending(each, by_slice.get(each.incarnation))
    }
    dry = frozenset(
        name for name, since_s in pending_since_s.items() if now_s - since_s >= DRY_AFTER_S
    )
    demands = demands_of(report, groups, dry, state.replacing)
    changes: list[Change] = []
    refusals = [
        Refusal(str(kind), "no worker group makes slices of this kind") for kind in demands.unmade
    ]
    unwanted_since_s: dict[str, float] = {}
    changed_at_s: dict[str, float] = {}
    for group in groups:
        demand = demands.by_group[group.name]
        done = _plan_group(demand, group, by_slice, rules, now_s, state, report.frozen)
        changes += done.changes
        refusals += done.refusals
        unwanted_since_s |= done.state.unwanted_since_s
        changed_at_s |= done.state.changed_at_s
    changes.sort(key=lambda change: change.replicas <= change.group.replicas)
    num_waiting = {name: demand.num_waiting for name, demand in demands.by_group.items()}
    replacing = replaced_now(groups, by_slice, state.replacing, num_waiting)
    known = PlannerState(unwanted_since_s, pending_since_s, changed_at_s, replacing)
    return ProvisioningPlan(tuple(changes), tuple(refusals), known)


def is_pending(each: ObservedSlice, record: SupplyRecord | None) -> bool:
    """Returns whether a slice has not got all of its machines; of one without a record by its pods.

    The pods are newer than the record, so a slice that has its machines has them.
    """
    if record is not None and record.state != SupplyState.PENDING:
        return False
    return any(pod.machine is None and pod.phase == PodPhase.PENDING for pod in each.pods)


def _plan_group(
    demand: SliceDemand,
    group: WorkerGroup,
    by_slice: Mapping[str, SupplyRecord],
    rules: ProvisioningRules,
    now_s: float,
    state: PlannerState,
    frozen: str | None,
) -> ProvisioningPlan:
    # Where a count was lowered without a name, more slices exist than are asked for.
    num_exist = max(group.asked_for, len(group.lasting))
    wanted = demand.to_exist_within(group.max_replicas)
    target = min(max(wanted, group.min_replicas), group.max_replicas)
    free = [each for each in group.lasting if each.incarnation not in demand.occupied]
    condemned = [each for each in free if is_condemned(by_slice.get(each.incarnation))]
    surplus = max(0, num_exist - len(condemned) - target)
    unwanted = _unwanted([each for each in free if each not in condemned], surplus, by_slice, state)
    since_s = {
        each.incarnation: state.unwanted_since_s.get(each.incarnation, now_s) for each in unwanted
    }
    drops = [
        Drop(each, is_condemned=True, reason=by_slice[each.incarnation].reason)
        for each in condemned
    ]
    for each in unwanted:
        idle_s = rules.idle_s
        if is_pending(each, by_slice.get(each.incarnation)):
            idle_s = min(idle_s, PENDING_IDLE_S)
        if (for_s := now_s - since_s[each.incarnation]) >= idle_s and frozen is None:
            reason = f"nobody has wanted it for {for_s:.0f} s"
            drops.append(Drop(each, is_condemned=False, reason=reason))
    reason = _change_reason(demand, group, surplus, len(condemned))
    # What is not wanted and not dropped yet stays in the count.
    num_stay = num_exist - len(drops)
    replicas = min(max(target, num_stay), max(group.replicas, group.max_replicas))
    num_made = max(0, replicas - num_stay)
    change = Change(group, replicas, tuple(drops), reason, num_made)
    refusals = _refused(demand, group)
    if unwanted and frozen is not None:
        names = ", ".join(sorted(each.name for each in unwanted))
        refusals.append(Refusal(group.name, f"not dropped though unwanted: {names}; {frozen}"))
    changed_at_s = state.changed_at_s.get(group.name)
    changes: tuple[Change, ...] = (change,) if change.is_scaling else ()
    if change.is_scaling:
        hindrance = _hindrance(group, rules, now_s, changed_at_s)
        if hindrance is None:
            changed_at_s = now_s
        else:
            changes = ()
            refusals.append(Refusal(group.name, hindrance))
    known = PlannerState(
        unwanted_since_s=since_s,
        changed_at_s={} if changed_at_s is None else {group.name: changed_at_s},
    )
    return ProvisioningPlan(changes, tuple(refusals), known)


def _unwanted(
    free: Iterable[ObservedSlice],
    surplus: int,
    by_slice: Mapping[str, SupplyRecord],
    state: PlannerState,
) -> list[ObservedSlice]:
    """The slices that are neither held nor needed, as many as there are too many of.

    Those that have been unwanted longest come first (who was chosen once stays chosen), then those
    that are still to come, then those that have failed, then the youngest.
    """

    def rank(each: ObservedSlice) -> tuple[float, bool, int]:
        record = by_slice.get(each.incarnation)
        unwanted_since_s = state.unwanted_since_s.get(each.incarnation, float("inf"))
        failures = 0 if record is None else record.num_failures
        return unwanted_since_s, each.is_running, -failures

    youngest_first = sorted(free, key=lambda each: (len(each.name), each.name), reverse=True)
    return sorted(youngest_first, key=rank)[:surplus]


def _hindrance(
    group: WorkerGroup, rules: ProvisioningRules, now_s: float, changed_at_s: float | None
) -> str | None:
    """Returns why the group may not be changed now; `None` if it may."""
    if group.pods_pending_deletion:
        names = ", ".join(sorted(group.pods_pending_deletion))
        return f"a change waits until the pods named for deletion are gone: {names}"
    if changed_at_s is not None and now_s - changed_at_s < rules.min_change_interval_s:
        wait_s = rules.min_change_interval_s - (now_s - changed_at_s)
        return f"a change waits another {wait_s:.1f} s, the group has just been changed"
    return None


def _refused(demand: SliceDemand, group: WorkerGroup) -> list[Refusal]:
    """Returns what the group's bounds refuse to the replicas."""
    missing = demand.num_to_exist - group.max_replicas
    if missing <= 0:
        return []
    reason = f"{demand.arithmetic} slices, maxReplicas is {group.max_replicas}: {missing} refused"
    if (partial := group.max_replicas - demand.to_exist_within(group.max_replicas)) > 0:
        reason += f"; {partial} more would be part of what a replica joins, and serve nobody"
    return [Refusal(group.name, reason)]


def _change_reason(
    demand: SliceDemand, group: WorkerGroup, surplus: int, num_condemned: int
) -> str:
    exist = f"{len(group.lasting)} exist, {group.asked_for} asked for"
    bounds = f"bounds {group.min_replicas} to {group.max_replicas}"
    condemned = f", {num_condemned} condemned" if num_condemned else ""
    return f"{demand.arithmetic}; {exist}{condemned}, {bounds}, {surplus} too many"
