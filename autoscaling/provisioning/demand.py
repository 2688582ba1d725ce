"""From what slice replicas say of themselves to the slices that have to exist, per kind.

Owns the arithmetic of demand. Does not know what exists (`plan` compares). Pure: no clock, no I/O.

    wanted    = held + waiting + unreplaced     slices that engines are to run on
    to exist  = wanted + leaving + released     those on their way out are still there

`leaving` are slices that somebody takes away at a known time: they drain with a deadline. Each is
replaced from that notice on, not from its death on. It is `unreplaced` until the successor of its
replica has begun; from then on the successor stands for the wish, waiting or with a slice of its
own. (To take the larger of waiting and leaving instead would buy a slice too many as soon as a
successor has its slice while the old one still drains, and one too few while a scale-up waits.)

`released` are slices that their replica drains because it is no longer wanted: nobody waits for a
replacement.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.directory import SliceRecord
from serving.slices.lifecycle import HOLDING, WAITING, SliceState

# Lives are timed by the clocks of different hosts. A successor taken for a newcomer would buy a
# slice; a newcomer taken for a successor only delays one until the true successor has begun.
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True, order=True)
class SliceKind:
    """What makes one slice as good as another: where it comes from and its shape."""

    compute_class: str
    generation: str
    topology: str

    def __str__(self) -> str:
        """For a reader: `spot v6e 4x4`."""
        return f"{self.compute_class} {self.generation} {self.topology}"


@dataclass(frozen=True, slots=True)
class Demand:
    """The slices of one kind that replicas want or have. The three sets of names are disjoint.

    `addresses` are those of all hosts that replicas have: they tell a held slice where its name
    does not, because Ray names a single host without a slice name after its node.
    """

    kind: SliceKind
    num_waiting: int = 0
    held: frozenset[str] = field(default_factory=frozenset)
    leaving: frozenset[str] = field(default_factory=frozenset)
    released: frozenset[str] = field(default_factory=frozenset)
    num_unreplaced: int = 0
    addresses: frozenset[str] = field(default_factory=frozenset)

    @property
    def num_wanted(self) -> int:
        """Slices that engines are to run on."""
        return len(self.held) + self.num_waiting + self.num_unreplaced

    @property
    def num_to_exist(self) -> int:
        """Slices that have to exist now, those included that are on their way out."""
        return self.num_wanted + len(self.leaving) + len(self.released)

    @property
    def occupied(self) -> frozenset[str]:
        """The slices that replicas have, by name. None of them may be dropped."""
        return self.held | self.leaving | self.released

    @property
    def arithmetic(self) -> str:
        """How `num_to_exist` comes about, for a log line."""
        return (
            f"{len(self.held)} held + {self.num_waiting} waiting + {self.num_unreplaced} unreplaced"
            f" + {len(self.leaving)} leaving + {len(self.released)} released = {self.num_to_exist}"
        )


def demand_by_kind(records: Iterable[SliceRecord]) -> dict[SliceKind, Demand]:
    """What the replicas behind `records` want, per kind of slice; in the order of the kinds.

    Ended lives want nothing, and neither do compute classes without slices. A slice that two
    records name (one of them has not noticed that its slice is gone, and that another one has come
    under its name) counts once, and as the firmer of the two: held, then leaving, then released.
    """
    by_kind: dict[SliceKind, list[SliceRecord]] = {}
    for record in records:
        if record.generation is not None and record.topology is not None:
            kind = SliceKind(record.compute_class, record.generation, record.topology)
            by_kind.setdefault(kind, []).append(record)
    return {kind: _demand(kind, by_kind[kind]) for kind in sorted(by_kind)}


def _demand(kind: SliceKind, records: list[SliceRecord]) -> Demand:
    holding = [record for record in records if record.state in HOLDING]
    draining = [record for record in holding if record.state == SliceState.DRAINING]
    held = {_slice_name(record) for record in holding if record.state != SliceState.DRAINING}
    leaving = {
        name: record
        for record in draining
        if record.drain_deadline_s is not None and (name := _slice_name(record)) not in held
    }
    released = {_slice_name(record) for record in draining} - leaving.keys() - held
    waiting = [record for record in records if record.state in WAITING]
    staying = [record for record in holding if record.state != SliceState.DRAINING]
    return Demand(
        kind,
        num_waiting=len(waiting),
        held=frozenset(held),
        leaving=frozenset(leaving),
        released=frozenset(released),
        num_unreplaced=_num_unreplaced(list(leaving.values()), waiting + staying),
        addresses=frozenset(host.address for record in holding for host in record.hosts),
    )


def _num_unreplaced(leaving: list[SliceRecord], others: list[SliceRecord]) -> int:
    """How many of `leaving` have no successor among `others`.

    A successor serves the same model and began after the notice. Each of `others` succeeds one at
    most: the latest notice takes the latest beginning, which leaves the fewest without.
    """
    unmatched = sorted(others, key=_begun_at_s)
    num_unreplaced = 0
    for notice in sorted(leaving, key=lambda record: record.life.entered_at_s, reverse=True):
        from_s = notice.life.entered_at_s - _CLOCK_SLACK_S
        successor = next(
            (
                each
                for each in reversed(unmatched)
                if each.model == notice.model and _begun_at_s(each) >= from_s
            ),
            None,
        )
        if successor is None:
            num_unreplaced += 1
        else:
            unmatched.remove(successor)
    return num_unreplaced


def _begun_at_s(record: SliceRecord) -> float:
    return record.life.phases[0].at_s


def _slice_name(record: SliceRecord) -> str:
    # A holder always knows the name. Were one not to, its slice would still have to be counted.
    return record.life.slice_name or record.replica_id
