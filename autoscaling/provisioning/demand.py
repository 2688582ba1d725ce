"""Turns the reports of slice replicas into the slices that have to exist, per kind.

Owns the arithmetic of demand. Does not know what exists (`plan` compares). Pure: no clock, no I/O.

    wanted    = held + waiting                  slices that engines are to run on
    to exist  = wanted + leaving + released     those on their way out are still there

`leaving` are slices that are taken away at a known time: they drain with a deadline. Their
replica begins its next life at that very notice (ADR 7) and waits, so each is replaced from the
notice on and not from its death on. A leaving slice never counts as what a waiting life could take.
(To order a replacement because a slice is leaving, and not because a life waits, would buy one
for every replica that is given up while its slice drains, as in a run on spot slices.)

`released` are slices that their replica drains because it is no longer wanted. A replica that
replaces it waits for that very slice (`serving.domain.succession`) and is not counted as waiting:
to count both would buy one slice more for every one that an upgrade replaces.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.domain.slice_lifecycle import HELD_STATES, WAITING, SliceState
from serving.domain.slice_records import SliceRecord
from serving.domain.succession import num_successors


@dataclass(frozen=True, slots=True, order=True)
class SliceKind:
    """The properties that make one slice as good as another: its compute class and its shape."""

    compute_class: str
    generation: str
    topology: str

    def __str__(self) -> str:
        """Returns the kind for a reader: `spot v6e 4x4`."""
        return f"{self.compute_class} {self.generation} {self.topology}"


@dataclass(frozen=True, slots=True, order=True)
class TakenSlice:
    """The slice that a replica has.

    `address` is that of its only host, since another living slice may have the same name. `None`:
    the slice has several hosts, or the replica does not know them.
    """

    name: str
    address: str | None = None


@dataclass(frozen=True, slots=True)
class SliceDemand:
    """The slices of one kind that replicas want or have. The three sets are disjoint.

    `joined` has the number of slices of each replica that waits for a multislice; they are among
    `num_waiting`. `addresses` are those of all hosts that replicas have: they identify a held
    slice where its name does not.
    """

    kind: SliceKind
    num_waiting: int = 0
    joined: tuple[int, ...] = ()
    held: frozenset[TakenSlice] = field(default_factory=frozenset)
    leaving: frozenset[TakenSlice] = field(default_factory=frozenset)
    released: frozenset[TakenSlice] = field(default_factory=frozenset)
    addresses: frozenset[str] = field(default_factory=frozenset)

    @property
    def num_wanted(self) -> int:
        """The number of slices that engines are to run on."""
        return len(self.held) + self.num_waiting

    @property
    def num_to_exist(self) -> int:
        """The number of slices that have to exist now, including those on their way out."""
        return self.num_wanted + len(self.leaving) + len(self.released)

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
    def occupied(self) -> frozenset[TakenSlice]:
        """The slices that replicas have. None of them may be dropped."""
        return self.held | self.leaving | self.released

    @property
    def arithmetic(self) -> str:
        """The sum behind `num_to_exist`, for a log line."""
        return (
            f"{len(self.held)} held + {self.num_waiting} waiting + {len(self.leaving)} leaving"
            f" + {len(self.released)} released = {self.num_to_exist}"
        )


def demand_by_kind(records: Iterable[SliceRecord]) -> dict[SliceKind, SliceDemand]:
    """Returns what the replicas behind `records` need per kind of slice, in the order of kinds.

    Ended lives need nothing, and neither do compute classes without slices. Two records may name
    the same slice of several hosts: one of them has not noticed that its slice is gone, and that
    another one has come under its name. Such a slice counts once, as the firmer of the two: held,
    then leaving, then released. Slices of one host are distinguished by address: two of them may
    exist under one name, and a replica that has not noticed a loss will need another slice anyway.
    """
    by_kind: dict[SliceKind, list[SliceRecord]] = {}
    for record in records:
        if record.generation is not None and record.topology is not None:
            kind = SliceKind(record.compute_class, record.generation, record.topology)
            by_kind.setdefault(kind, []).append(record)
    return {kind: _demand(kind, by_kind[kind]) for kind in sorted(by_kind)}


def _merged(records: Iterable[SliceRecord]) -> tuple[int, ...]:
    """Returns the number of slices of each waiting replica that needs several."""
    parts: dict[str, set[int]] = {}
    for record in records:
        if record.state in WAITING:
            parts.setdefault(record.life_id, set()).add(record.part)
    return tuple(sorted(len(each) for each in parts.values() if len(each) > 1))


def _demand(kind: SliceKind, records: list[SliceRecord]) -> SliceDemand:
    holding = [record for record in records if record.state in HELD_STATES]
    draining = [record for record in holding if record.state == SliceState.DRAINING]
    taken_away = [record for record in draining if record.drain_deadline_s is not None]
    held = {_taken_slice(record) for record in holding if record.state != SliceState.DRAINING}
    leaving = {_taken_slice(record) for record in taken_away} - held
    released = {_taken_slice(record) for record in draining} - leaving - held
    return SliceDemand(
        kind,
        num_waiting=sum(record.state in WAITING for record in records) - _num_served_soon(records),
        joined=_merged(records),
        held=frozenset(held),
        leaving=frozenset(leaving),
        released=frozenset(released),
        addresses=frozenset(host.address for record in holding for host in record.hosts),
    )


def _num_served_soon(records: Iterable[SliceRecord]) -> int:
    """Counts the waiting replicas that are about to be handed the slice of another one."""
    deployments: dict[str, list[SliceRecord]] = {}
    for record in records:  # of one kind, so of one compute class
        deployments.setdefault(record.model, []).append(record)
    return sum(map(num_successors, deployments.values()))


def _taken_slice(record: SliceRecord) -> TakenSlice:
    address = record.hosts[0].address if len(record.hosts) == 1 else None
    # A holder always knows the name. Were one not to, its slice would still have to be counted.
    return TakenSlice(record.life.slice_name or record.replica_id, address)
