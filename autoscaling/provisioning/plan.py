"""Compares demand with what exists and plans the changes: how many slices, and which of them go.

Owns every rule of adding and dropping slices. Does not own the demand (`demand`), the check that a
slice is free when it is dropped (`fence`), nor how a change is made (a `Provisioner`). Pure:
no clock, no I/O, no chance. What has to be remembered from one plan to the next comes in and goes
out as `PlannerState`; to forget it costs time, never a slice that a replica has.

The rules:

1. A slice that a replica has is never dropped.
2. Slices are dropped by name, never more of them than the count falls by, measured from the slices
   that exist or the count, whichever is more. (A fallen count without names would leave the choice
   to others; names without a fallen count would only replace.)
3. A slice is dropped once it has been unwanted for `idle_s`; at once if it is being taken away and
   its replica has left it, because its replacement was ordered long before.
4. The count stays between the group's bounds; what they refuse is reported. Slices that one replica
   joins are requested together or not at all.
5. While pods that were named for deletion are still there, nothing changes: Ray's provider waits
   for the same.
6. Two changes of a group are `min_change_interval_s` apart.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoscaling.provisioning.demand import SliceDemand, SliceKind, TakenSlice
from autoscaling.provisioning.groups import ObservedSlice, WorkerGroup
from serving.domain.slice_records import LEASE_S


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

    `unwanted_since_s` is by incarnation, `changed_at_s` by group. `condemned` are the names of
    slices that were announced to be taken away, by group.
    """

    unwanted_since_s: Mapping[str, float] = field(default_factory=dict)
    condemned: Mapping[str, frozenset[str]] = field(default_factory=dict)
    changed_at_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drop:
    """The slice to be dropped. `is_condemned`: it is taken away anyway."""

    slice: ObservedSlice
    is_condemned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one group: it gets `replicas` in all, without the slices of `drops`."""

    group: WorkerGroup
    replicas: int
    drops: tuple[Drop, ...]
    reason: str

    @property
    def is_scaling(self) -> bool:
        """Returns whether the group itself changes, and not only the count that mirrors it."""
        return self.replicas != self.group.replicas or bool(self.drops)

    def keeping(self, kept: Container[str]) -> "Change | None":
        """The change without the drops of these slices; `None` if nothing is left of it."""
        drops = tuple(drop for drop in self.drops if drop.slice.incarnation not in kept)
        if drops == self.drops:
            return self
        replicas = self.replicas + len(self.drops) - len(drops)
        # Where fewer slices were asked for than exist, keeping one must not ask for more.
        replicas = min(replicas, max(self.group.replicas, self.group.max_replicas))
        less = replace(self, replicas=replicas, drops=drops)
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
        condemned = dict(self.state.condemned)
        for change in self.changes:
            group = change.group.name
            for drop in change.drops:
                if reason := kept.get(drop.slice.incarnation):
                    name = drop.slice.name
                    refusals.append(Refusal(group, f"{name} is not dropped: {reason}"))
                    if drop.is_condemned:
                        condemned[group] = condemned.get(group, frozenset()) | {name}
        return ProvisioningPlan(
            tuple(less for change in self.changes if (less := change.keeping(kept)) is not None),
            tuple(refusals),
            replace(self.state, condemned=condemned),
        )


def plan_slices(
    demands: Mapping[SliceKind, SliceDemand],
    groups: Iterable[WorkerGroup],
    rules: ProvisioningRules,
    now_s: float,
    state: PlannerState,
) -> ProvisioningPlan:
    """The changes that bring `groups` to what `demands` ask for, as far as `rules` allow now.

    `now_s` is on the clock of `state`. A group without any request is brought down to its minimum.
    """
    by_kind: dict[SliceKind, list[WorkerGroup]] = {}
    for group in groups:
        by_kind.setdefault(group.kind, []).append(group)
    changes: list[Change] = []
    refusals: list[Refusal] = []
    unwanted_since_s: dict[str, float] = {}
    condemned: dict[str, frozenset[str]] = {}
    changed_at_s: dict[str, float] = {}
    for kind in sorted(by_kind.keys() | demands.keys()):
        demand = demands.get(kind, SliceDemand(kind))
        match by_kind.get(kind, []):
            case [group]:
                done = _plan_group(demand, group, rules, now_s, state)
                changes += done.changes
                refusals += done.refusals
                unwanted_since_s |= done.state.unwanted_since_s
                condemned |= done.state.condemned
                changed_at_s |= done.state.changed_at_s
            case []:
                if demand.num_to_exist:
                    refusals.append(Refusal(str(kind), "no worker group makes slices of this kind"))
            case several:
                names = ", ".join(sorted(group.name for group in several))
                reason = f"several worker groups make slices of this kind ({names}): none is used"
                refusals.append(Refusal(str(kind), reason))
    changes.sort(key=lambda change: change.replicas <= change.group.replicas)
    known = PlannerState(unwanted_since_s, condemned, changed_at_s)
    return ProvisioningPlan(tuple(changes), tuple(refusals), known)


def _plan_group(
    demand: SliceDemand,
    group: WorkerGroup,
    rules: ProvisioningRules,
    now_s: float,
    state: PlannerState,
) -> ProvisioningPlan:
    # Where a count was lowered without a name, more slices exist than are asked for.
    base = max(group.asked_for, len(group.lasting))
    wanted = demand.to_exist_within(group.max_replicas)
    target = min(max(wanted, group.min_replicas), group.max_replicas)
    surplus = max(0, base - target)
    condemned = _condemned(demand, group, surplus, state)
    unwanted = _unwanted(demand, group, surplus, condemned, state)
    since_s = {
        each.incarnation: state.unwanted_since_s.get(each.incarnation, now_s) for each in unwanted
    }
    drops = tuple(
        drop
        for each in unwanted
        if (drop := _drop(each, condemned, now_s - since_s[each.incarnation], rules)) is not None
    )
    replicas = target if not surplus else base - len(drops)
    replicas = min(replicas, max(group.replicas, group.max_replicas))
    change = Change(group, replicas, drops, _change_reason(demand, group, surplus))
    refusals = _refused(demand, group)
    changed_at_s = state.changed_at_s.get(group.name)
    is_mirrored = group.mirrored_replicas in (None, replicas)
    changes: tuple[Change, ...] = (change,) if change.is_scaling or not is_mirrored else ()
    if change.is_scaling:
        hindrance = _hindrance(group, rules, now_s, changed_at_s)
        if hindrance is None:
            changed_at_s = now_s
            # Whatever gets the name of a dropped slice from now on was asked for.
            condemned -= {drop.slice.name for drop in drops}
        else:
            changes = ()
            refusals.append(Refusal(group.name, hindrance))
    known = PlannerState(
        since_s,
        {group.name: condemned} if condemned else {},
        {} if changed_at_s is None else {group.name: changed_at_s},
    )
    return ProvisioningPlan(changes, tuple(refusals), known)


def _condemned(
    demand: SliceDemand, group: WorkerGroup, surplus: int, state: PlannerState
) -> frozenset[str]:
    """Returns the names of slices with an ordered replacement: they may go at once.

    That holds for what KubeRay puts in the place of such a slice too, until somebody takes it or
    there is nothing too many.
    """
    known = state.condemned.get(group.name, frozenset())
    if not surplus:
        known = frozenset()
    present = frozenset(each.name for each in group.slices)
    held = frozenset[str]().union(*_names_by_address(demand.held, group))
    return (known & present - held) | _names_of_leaving(demand, group)


def _names_by_address(
    taken: frozenset[TakenSlice], group: WorkerGroup
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the group's names for slices it knows by address, and the names of the other slices.

    Slices of several hosts go by their name. The group's name for a slice of one host may be the
    name of another slice in Ray.
    """
    if group.num_hosts > 1:
        return frozenset(), frozenset(each.name for each in taken)
    names = {address: each.name for each in group.slices for address in each.addresses}
    known = {each: names[each.address] for each in taken if each.address in names}
    return frozenset(known.values()), frozenset(each.name for each in taken - known.keys())


def _names_of_leaving(demand: SliceDemand, group: WorkerGroup) -> frozenset[str]:
    """Returns the group's names for slices that are taken away, or for what replaces them.

    A slice is gone if the group does not know its address. Then a slice with the same name and
    another address is not meant.
    """
    known, names = _names_by_address(demand.leaving, group)
    if group.num_hosts == 1:
        others = frozenset(each.name for each in group.slices if each.addresses)
        known_by_name = frozenset(each.name for each in demand.leaving if each.address is None)
        names = (names - others) | known_by_name
    return known | names


def _unwanted(
    demand: SliceDemand,
    group: WorkerGroup,
    surplus: int,
    condemned: frozenset[str],
    state: PlannerState,
) -> list[ObservedSlice]:
    """The slices that are neither held nor needed, as many as there are too many of.

    Those that will be taken away come first, then those that have been unwanted longest (who was
    chosen once stays chosen), then those that are still to come, then the youngest.
    """
    occupied = frozenset[str]().union(*_names_by_address(demand.occupied, group))
    free = [
        each
        for each in group.lasting
        if each.name not in occupied and not each.addresses & demand.addresses
    ]
    since_s = state.unwanted_since_s

    def rank(each: ObservedSlice) -> tuple[bool, float, bool]:
        unwanted_since_s = since_s.get(each.incarnation, float("inf"))
        return each.name not in condemned, unwanted_since_s, each.is_running

    youngest_first = sorted(free, key=lambda each: (len(each.name), each.name), reverse=True)
    return sorted(youngest_first, key=rank)[:surplus]


def _drop(
    each: ObservedSlice, condemned: frozenset[str], unwanted_s: float, rules: ProvisioningRules
) -> Drop | None:
    if each.name in condemned:
        return Drop(each, is_condemned=True, reason="it is taken away, its replica has left it")
    if unwanted_s >= rules.idle_s:
        reason = f"nobody has wanted it for {unwanted_s:.0f} s"
        return Drop(each, is_condemned=False, reason=reason)
    return None


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


def _change_reason(demand: SliceDemand, group: WorkerGroup, surplus: int) -> str:
    exist = f"{len(group.lasting)} exist, {group.asked_for} asked for"
    bounds = f"bounds {group.min_replicas} to {group.max_replicas}"
    return f"{demand.arithmetic}; {exist}, {bounds}, {surplus} too many"
