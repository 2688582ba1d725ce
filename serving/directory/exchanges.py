"""Which slice goes when Serve ends a replica: the one that the plan gives up first. Pure.

Serve takes no order of ours: it ends a replica that has not started yet, or the newest one on the
node with the fewest. Where another replica of the same engines has a slice that is to go before,
the two exchange: the engine of the one that ends is left to the other, which gives its own slice up
and takes that engine over. Nothing is loaded again, and one slice is given back, as Serve had it.

Owns the choice and what has been agreed. Does not own the taking over (`orphans`). Callers pass
`now_s`, on one monotonic clock.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.directory.orphans import fits
from serving.directory.supply_book import life_key
from serving.domain.slice_lifecycle import HELD_STATES, WAITING, SliceState
from serving.domain.slice_records import SliceRecord

# The replica that ends lets go of its engine first: a claim before that is refused.
TOLD_AFTER_S = 1.0
# How long a replica that gives its slice up may take to come for the engine.
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The exchange of the engine of `own` for the slice of `giver`.

    `giver` is a key of a life, `None` if nobody is left to give a slice up.
    """

    own: SliceRecord
    order: tuple[str, ...]
    giver: str | None
    since_s: float


class Exchanges:
    """The exchanges that are under way. A directory that starts anew knows of none."""

    def __init__(self) -> None:
        self._by_orphan: dict[str, _Exchange] = {}
        # Lives that end with their replicas, slices and all, though they are still on the list.
        self._ending: set[str] = set()
        # The replicas that had each engine before: a plan may know it by one of them.
        self._former: dict[str, set[str]] = {}

    def leave(
        self,
        own: SliceRecord,
        records: Sequence[SliceRecord],
        order: Sequence[str],
        barred: Container[str],
        now_s: float,
    ) -> bool:
        """Returns whether the engine of a replica that Serve ends stays, and another slice goes.

        `order` are slices in the order in which to give them up, by the life of their replica. What
        is not among them comes last. `barred` are lives that have to leave their slices anyway.
        """
        self._ending.add(life_key(own))
        for orphan, exchange in self._by_orphan.items():
            if exchange.giver == life_key(own):
                # Its slice goes now, by Serve's choice as well: it comes for no engine.
                self._by_orphan[orphan] = self._choose(exchange, records, barred, now_s)
                return False
        if own.replica_id in barred or not own.hosts:
            return False
        chosen = self._choose(_Exchange(own, tuple(order), None, now_s), records, barred, now_s)
        if (before := self._kept_before(chosen, records)) is not None:
            # Whoever was to come for that engine comes for this one.
            chosen = replace(chosen, giver=self._by_orphan[before].giver)
            self._by_orphan[before] = replace(self._by_orphan[before], giver=None)
        if chosen.giver is None:
            return False
        self._by_orphan[own.replica_id] = chosen
        self._former.setdefault(own.engine_id or "", set()).add(own.replica_id)
        return True

    def look(
        self, records: Sequence[SliceRecord], barred: Container[str], now_s: float
    ) -> Mapping[str, str]:
        """Takes in what has become of the exchanges; returns why engines are not wanted after all.

        They are by the replica that had the engine. Whoever is to come for one and does not is
        replaced by the next.
        """
        lives = {life_key(record) for record in records}
        self._ending &= lives
        engines = {record.engine_id for record in records}
        self._former = {name: was for name, was in self._former.items() if name in engines}
        listed = {record.replica_id for record in records}
        self._by_orphan = {
            orphan: exchange for orphan, exchange in self._by_orphan.items() if orphan in listed
        }
        held = {life_key(record) for record in records if _has_slice(record)}
        for orphan, exchange in self._by_orphan.items():
            is_awaited = exchange.giver in held or any(
                record.state in WAITING and fits(record, exchange.own) for record in records
            )
            if not is_awaited and now_s - exchange.since_s >= PATIENCE_S:
                self._by_orphan[orphan] = self._choose(exchange, records, barred, now_s)
        return {
            orphan: "one replica fewer is wanted, and no other gives its slice up for this engine"
            for orphan, exchange in self._by_orphan.items()
            if exchange.giver is None
        }

    def leave_reason(self, record: SliceRecord, now_s: float) -> str | None:
        """Returns why a replica is to give its slice up; `None` if it is not to."""
        for exchange in self._by_orphan.values():
            if exchange.giver == life_key(record) and now_s >= exchange.since_s + TOLD_AFTER_S:
                name = exchange.own.life.slice_name or exchange.own.replica_id
                return f"the plan gives it up before {name}, and one replica fewer is wanted"
        return None

    def _kept_before(self, chosen: _Exchange, records: Iterable[SliceRecord]) -> str | None:
        """Returns which engine that another is to come for goes before `own` and its giver."""
        place, own = self._places(chosen.order), chosen.own
        giver = next((each for each in records if life_key(each) == chosen.giver), own)
        kept = [
            each.own
            for each in self._by_orphan.values()
            if each.giver is not None and fits(each.own, own) and place(each.own) < place(giver)
        ]
        first = min(kept, key=place, default=None)
        return None if first is None else first.replica_id

    def _places(self, order: Sequence[str]) -> Callable[[SliceRecord], int]:
        """Returns the place of each slice in the order; those that are not in it are behind it."""
        places = {replica_id: number for number, replica_id in enumerate(order)}

        def place(record: SliceRecord) -> int:
            names = {record.replica_id} | self._former.get(record.engine_id or "", set())
            return min((places[name] for name in names if name in places), default=len(places))

        return place

    def _choose(
        self,
        exchange: _Exchange,
        records: Iterable[SliceRecord],
        barred: Container[str],
        now_s: float,
    ) -> _Exchange:
        """Returns the exchange with whoever has the slice that is to go first, if before `own`."""
        own = exchange.own
        deployment = [
            record
            for record in records
            if (record.model, record.compute_class) == (own.model, own.compute_class)
            and record.has_engine
        ]
        place = self._places(exchange.order)
        taken = self._ending | {each.giver for each in self._by_orphan.values()}
        givers = [
            record
            for record in deployment
            if _has_slice(record)
            and fits(record, own)
            and place(record) < place(own)
            and record.replica_id not in barred
            and life_key(record) not in taken
        ]
        # Where a deployment gets another version all its slices change hands.
        is_updated = any(record.fingerprint != own.fingerprint for record in deployment)
        if not givers or is_updated:
            return replace(exchange, giver=None, since_s=now_s)
        first = min(givers, key=place)
        return replace(exchange, giver=life_key(first), since_s=now_s)


def _has_slice(record: SliceRecord) -> bool:
    """Returns whether its replica has a slice and stays on it."""
    return (
        record.state in HELD_STATES
        and record.state != SliceState.DRAINING
        and bool(record.hosts)
        and not record.is_orphan
    )
