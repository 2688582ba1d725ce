"""Turns the records of all slices into those that have to exist, per worker group.

Owns the arithmetic of demand, and which of several groups makes what a replica waits for. Does not
own what becomes of a group (`plan`). Pure: no clock, no I/O.

    wanted    = held + waiting                           slices that engines are to run on
    to exist  = wanted + leaving + released + leased     the others are still there

`leaving` are slices that are taken away at a known time: they drain with a deadline. Their
replica begins its next life at that very notice (ADR 7) and waits, so each is replaced from the
notice on and not from its death on. A leaving slice never counts as what a waiting life could take.
(To order a replacement because a slice is leaving, and not because a life waits, would buy one
for every replica that is given up while its slice drains, as in a run on spot slices.)

`released` are slices that their replica drains because it is no longer wanted. A replica that
replaces it waits for that very slice (`supply.succession`) and is not counted as waiting: to count
both would buy one slice more for every one that an upgrade replaces. So are slices that we replace
ourselves, because their pods are of an older template: what their replica waits for is made in
their place.

`leased` are slices whose chips are taken although no replica says that it has them. At first they
are `changing`: a replica that takes a slice says so seconds later, and waits until then; one that
has lost its slice waits again while Ray still shows its chips as taken. To count both would buy a
slice more each time. Such a slice is what somebody who waits has or may have; nobody drops it.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaling.provisioning.groups import SliceKind, WorkerGroup
from serving.domain.supply.records import (
    SupplyRecord,
    SupplyReport,
    SupplyState,
    WaitingReplica,
)


@dataclass(frozen=True, slots=True)
class SliceDemand:
    """The slices of one group that replicas want or have, by incarnation. The sets are disjoint.

    `joined` has the number of slices of each replica that waits for a multislice; they are among
    `num_waiting`, except for those that other replicas hand over.
    """

    num_waiting: int = 0
    joined: tuple[int, ...] = ()
    held: frozenset[str] = field(default_factory=frozenset)
    leaving: frozenset[str] = field(default_factory=frozenset)
    released: frozenset[str] = field(default_factory=frozenset)
    leased: frozenset[str] = field(default_factory=frozenset)
    changing: frozenset[str] = field(default_factory=frozenset)

    @property
    def num_wanted(self) -> int:
        """The number of slices that engines are to run on."""
        return len(self.held) + self.num_waiting

    @property
    def num_to_exist(self) -> int:
        """The number of slices that have to exist now, including those on their way out."""
        return self.num_wanted + len(self.leaving) + len(self.released) + len(self.leased)

    def to_exist_within(self, most: int) -> int:
        """Returns `num_to_exist` without the multislices that would exceed `most`.

        Part of a multislice is not bought, because it would serve nothing. Replicas that want few
        slices come before those that want many.
        """
        if self.num_to_exist <= most or not self.joined:
            return self.num_to_exist
        alone = max(0, self.num_waiting - sum(self.joined))
        # `num_waiting` leaves out the slices that other replicas hand over.
        handed_over = alone + sum(self.joined) - self.num_waiting
        fixed = self.num_to_exist - self.num_waiting
        wanted = alone
        for size in sorted(self.joined):
            if fixed + wanted + size - handed_over <= most:
                wanted += size
        return fixed + max(0, wanted - handed_over)

    @property
    def occupied(self) -> frozenset[str]:
        """The slices that somebody has. None of them may be dropped."""
        return self.held | self.leaving | self.released | self.leased | self.changing

    @property
    def arithmetic(self) -> str:
        """The sum behind `num_to_exist`, for a log line."""
        leased = f" + {len(self.leased)} leased" if self.leased else ""
        return (
            f"{len(self.held)} held + {self.num_waiting} waiting + {len(self.leaving)} leaving"
            f" + {len(self.released)} released{leased} = {self.num_to_exist}"
        )


@dataclass(frozen=True, slots=True)
class Demands:
    """The demand of every group, by name; and the kinds that replicas want and no group makes."""

    by_group: Mapping[str, SliceDemand]
    unmade: tuple[SliceKind, ...] = ()


def demands_of(
    report: SupplyReport,
    groups: Iterable[WorkerGroup],
    dry: frozenset[str] = frozenset(),
    replacing: Container[str] = (),
) -> Demands:
    """Returns what replicas need of each group.

    A slice counts in the group that has its pods. A replica that waits is counted in one group of
    its kind: where slices are to spare, else where there is room. `dry` are incarnations that
    have been asked for in vain for long: they are not to spare while another group has room.
    `replacing` are those that are replaced because their pods are of an older template.
    """
    groups = sorted(groups, key=lambda group: group.name)
    demands = {group.name: SliceDemand() for group in groups}
    unmade: list[SliceKind] = []
    by_slice = records_by_slice(report, groups)
    here = {id(record) for record in by_slice.values()}
    for group in groups:
        for each in group.slices:
            if (record := by_slice.get(each.incarnation)) is not None:
                demand = demands[group.name]
                is_replaced = each.incarnation in replacing
                demands[group.name] = _with_taken(
                    demand, record, each.incarnation, is_replaced=is_replaced
                )
    for record in report.slices:
        if id(record) not in here and record.is_taken:
            # Its pods have gone, and its replica has not noticed: it will want another one.
            owner = _group_of(record, groups)
            if owner is None:
                unmade.append(_kind_of(record))
            else:
                demand = demands[owner.name]
                demands[owner.name] = _with_taken(demand, record, record.incarnation)
    spare = {group.name: _spare(group, demands[group.name], by_slice, dry) for group in groups}
    is_dry = {group.name: any(each.incarnation in dry for each in group.slices) for group in groups}
    for wish, num_slices in _wishes(report, replacing):
        chosen = _choose(wish, num_slices, groups, demands, spare, is_dry)
        if chosen is None:
            unmade.append(_kind_of(wish))
            continue
        demand = demands[chosen.name]
        joined = (*demand.joined, wish.num_slices) if wish.num_slices > 1 else demand.joined
        demands[chosen.name] = replace(
            demand, num_waiting=demand.num_waiting + num_slices, joined=tuple(sorted(joined))
        )
        spare[chosen.name] -= num_slices
    return Demands(demands, tuple(sorted(set(unmade))))


def records_by_slice(
    report: SupplyReport, groups: Iterable[WorkerGroup]
) -> dict[str, SupplyRecord]:
    """Returns the record of each slice of `groups`, by incarnation as the groups have it.

    They are joined by their pods, or by a host's address where Ray was told of no pod. A slice of
    which the directory does not know yet has none.
    """
    by_pod = {pod: record for record in report.slices for pod in record.pods}
    by_address = {
        host.address: record
        for record in report.slices
        for host in record.hosts
        if host.pod is None and host.address is not None
    }
    found = {}
    for group in groups:
        for each in group.slices:
            for pod in each.pods:
                record = by_pod.get(pod.name) or by_address.get(pod.address or "")
                if record is not None:
                    found[each.incarnation] = record
                    break
    return found


def _with_taken(
    demand: SliceDemand, record: SupplyRecord, name: str, *, is_replaced: bool = False
) -> SliceDemand:
    """Returns the demand with a slice that somebody has; other slices are no demand."""
    incarnation = frozenset({name})
    if record.holder is None:
        if record.is_changing_hands:
            return replace(demand, changing=demand.changing | incarnation)
        is_leased = record.state == SupplyState.LEASED
        return replace(demand, leased=demand.leased | incarnation) if is_leased else demand
    # Whether or not its replica has said yet that it leaves: its next life may be there before.
    if record.holder.is_handing_over or is_replaced:
        return replace(demand, released=demand.released | incarnation)
    if record.holder.is_leaving:
        return replace(demand, leaving=demand.leaving | incarnation)
    return replace(demand, held=demand.held | incarnation)


def _wishes(report: SupplyReport, replacing: Container[str]) -> list[tuple[WaitingReplica, int]]:
    """Returns who waits and for how many slices, the oldest first.

    Without those that wait for the slice of a replica of their deployment that leaves, or for the
    one that is made in its place: the ones that came last.
    """
    handed_over: dict[tuple[str, str], int] = {}
    for record in report.slices:
        holder = record.holder
        if holder is not None and (holder.is_handing_over or record.incarnation in replacing):
            key = holder.model, holder.compute_class
            handed_over[key] = handed_over.get(key, 0) + 1
    wishes = []
    for wish in sorted(report.waiting, key=lambda each: (each.since_s, each.life_id), reverse=True):
        key = wish.model, wish.compute_class
        given = min(wish.num_slices, handed_over.get(key, 0))
        handed_over[key] = handed_over.get(key, 0) - given
        if wish.num_slices > given:
            wishes.append((wish, wish.num_slices - given))
    return wishes[::-1]


def _choose(
    wish: WaitingReplica,
    num_slices: int,
    groups: Sequence[WorkerGroup],
    demands: Mapping[str, SliceDemand],
    spare: Mapping[str, int],
    is_dry: Mapping[str, bool],
) -> WorkerGroup | None:
    """Returns the group that is to make what a replica waits for; `None` if none can."""
    kind = SliceKind(wish.compute_class, wish.generation, wish.topology)
    fitting = [group for group in groups if group.kind == kind and wish.zone in (None, group.zone)]

    def rank(group: WorkerGroup) -> tuple[bool, bool, bool, int, str]:
        name = group.name
        room = group.max_replicas - demands[name].num_to_exist
        return spare[name] < num_slices, room < num_slices, is_dry[name], -spare[name], name

    return min(fitting, key=rank, default=None)


def _spare(
    group: WorkerGroup,
    demand: SliceDemand,
    by_slice: Mapping[str, SupplyRecord],
    dry: frozenset[str],
) -> int:
    """Returns how many slices of the group are there, or were asked for, and no replica reports."""
    no_supply = (demand.occupied - demand.changing) | dry
    return sum(
        each.incarnation not in no_supply and not is_condemned(by_slice.get(each.incarnation))
        for each in group.lasting
    )


def is_condemned(record: SupplyRecord | None) -> bool:
    """Returns whether a slice goes, or has to."""
    return record is not None and record.state == SupplyState.CONDEMNED


def _group_of(record: SupplyRecord, groups: Iterable[WorkerGroup]) -> WorkerGroup | None:
    """Returns the group of a slice whose pods have gone."""
    kind = _kind_of(record)
    for group in groups:
        if record.group == group.name or (record.group is None and group.kind == kind):
            return group
    return None


def _kind_of(each: SupplyRecord | WaitingReplica) -> SliceKind:
    compute_class = each.compute_class
    if isinstance(each, SupplyRecord) and each.holder is not None:
        compute_class = each.holder.compute_class
    return SliceKind(compute_class or "", each.generation, each.topology)
