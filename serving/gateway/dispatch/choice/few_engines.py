"""The choice of an engine where there are few of them, one after the other.

It is `routing.choose_engine`, decision by decision and word by word, which looks at all engines at
once: of so few its arrays cost several times what they save. One test holds both to the same plain
rule. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.gateway.dispatch.choice.engine_table import UNBOUNDED, EngineColumns, EngineTable
from serving.gateway.dispatch.choice.routing import (
    FOR_OTHERS,
    MOST_IN_STEP,
    SAME_TOKENS,
    SEQUENCE_TOKENS,
    STEP_TOKENS,
    Route,
    Wish,
    choose_engine,
)
from serving.gateway.dispatch.requests import EngineConnection

# With eight both take as long. Of so few all are compared, so that nothing has to be drawn.
MOST_ENGINES = 4


@dataclass(slots=True)
class EngineView:
    """What is known of one engine; the fields are those of `EngineColumns`. Never changed."""

    engine_id: str
    num_in_flight: int
    num_dispatched: int
    backlog_tokens: int
    kv_tokens: int
    computed_ratio: float
    has_place: bool
    is_empty: bool
    is_kept: bool
    has_full_line: bool
    is_draining: bool
    is_leaving: bool
    is_known: bool
    is_late: bool

    @classmethod
    def of(cls, connection: EngineConnection, now_s: float, *, is_known: bool) -> "EngineView":
        """Returns what is known of a connected engine at a time of the loop."""
        by_s, until_s = connection.migrate_by_s, connection.late_until_s
        moment = (
            connection.is_draining,
            by_s is not None and now_s >= by_s,
            is_known,
            until_s is not None and now_s < until_s,
        )
        engine_id, num_dispatched = connection.engine_id, connection.num_dispatched
        room = connection.room
        if room is None:
            count = len(connection.requests)
            room_of = (0, UNBOUNDED, 1.0, True, False, False, False)
            return cls(engine_id, count, num_dispatched, *room_of, *moment)
        count, left = room.num_sequences, room.kv_tokens_left
        return cls(
            engine_id,
            count,
            num_dispatched,
            room.backlog_tokens,
            UNBOUNDED if left is None else left,
            room.computed_ratio,
            room.has_place,
            count == 0,
            room.is_kept_free,
            room.has_full_line,
            *moment,
        )


class ConnectedEngines:
    """The engines that are connected, and the choice of one: as arrays or one after the other."""

    def __init__(self) -> None:
        self._table = EngineTable()

    def add(self, connection: EngineConnection, *, is_known: bool) -> None:
        """Adds an engine; of one that `is_known` it is known what it has cached."""
        self._table.add(connection, is_known=is_known)

    def remove(self, engine_id: str) -> None:
        """Takes an engine away; without effect if it is none of these."""
        self._table.remove(engine_id)

    def columns(self, now_s: float) -> EngineColumns:
        """Returns what is known of all, of the event loop's time; see `EngineTable.columns`."""
        return self._table.columns(now_s)

    def choose(self, wish: Wish, now_s: float) -> Route:
        """Chooses one for a request, of the event loop's time; see `routing.choose_engine`."""
        engines = self._table.engines
        if len(engines) > MOST_ENGINES:
            return choose_engine(self._table.columns(now_s), self._table.rows, wish)
        views = [EngineView.of(each, now_s, is_known=is_known) for each, is_known in engines]
        return choose_of_few(views, wish)


def _to_first(engine: EngineView, computed: int) -> int:
    line = engine.backlog_tokens + computed
    step_tokens = STEP_TOKENS + SEQUENCE_TOKENS * engine.num_in_flight
    return line + -(-line // MOST_IN_STEP) * step_tokens


class _Costs:
    """What a request takes on an engine."""

    __slots__ = ("engine", "to_first", "total", "uncached")

    def __init__(self, engine: EngineView, wish: Wish) -> None:
        need = wish.need
        if wish.cached is not None and engine.is_known:
            uncached = max(1, need.num_tokens - wish.cached.get(engine.engine_id, 0))
        else:
            uncached = round(need.num_tokens * engine.computed_ratio)
        self.engine, self.uncached = engine, uncached
        self.to_first = to_first = _to_first(engine, uncached)
        if wish.spread_tokens:
            uncached = min(uncached, max(1, need.num_tokens - wish.spread_tokens))
            to_first = _to_first(engine, uncached)
        later = need.num_expected * SEQUENCE_TOKENS * engine.num_in_flight
        self.total = to_first + FOR_OTHERS * uncached + later

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """Sorts engines, the best one first."""
        engine = self.engine
        total = self.total // SAME_TOKENS
        return total, engine.num_in_flight, engine.num_dispatched, engine.engine_id

    def has_room(self, num_expected: int) -> bool:
        """Returns whether the engine can have the request now."""
        engine = self.engine
        has_kv = engine.is_empty or engine.kv_tokens >= self.uncached + num_expected
        return engine.has_place and has_kv


def choose_of_few(engines: Sequence[EngineView], wish: Wish) -> Route:
    """Chooses as `routing.choose_engine` does; of `MOST_ENGINES` at most."""
    candidates = [each for each in engines if not each.is_draining]
    candidates = candidates or [each for each in engines if not each.is_leaving]
    candidates = [each for each in candidates if not each.is_late] or candidates
    if not candidates:
        return Route(None, "no engine is ready")
    if wish.needs_isolation:
        candidates = [each for each in candidates if each.engine_id not in wish.isolated]
        if not candidates:
            return Route(None, "every engine has an isolated request", is_open_to_others=True)
    costs = [_Costs(each, wish) for each in candidates]
    num_expected = wish.need.num_expected
    has_room = [each for each in costs if each.has_room(num_expected)]
    with_room = has_room
    if wish.leaves_room:
        with_room = [each for each in has_room if not each.engine.is_kept]
    if not with_room:
        if has_room:
            reason = "the room that is left is kept for others"
            return Route(None, reason, is_open_to_others=True, is_kept=True)
        has_place = any(each.has_place for each in candidates)
        return Route(None, "no engine has room for it", is_open_to_others=has_place)
    best = _best(with_room)
    if soon := [each for each in costs if each.engine.has_full_line]:
        better = _best(soon)
        if better.total + SAME_TOKENS < best.total:
            reason = f"waits for {better.engine.engine_id}, where it takes less"
            return Route(None, reason, is_open_to_others=True, is_for_cache=True)
    engine_id = best.engine.engine_id
    if (found := wish.need.num_tokens - best.uncached) > 0:
        return Route(engine_id, f"soonest there ({found} tokens cached)", best.to_first)
    return Route(engine_id, f"fewest in flight ({best.engine.num_in_flight})", best.to_first)


def _best(costs: list[_Costs]) -> _Costs:
    return costs[0] if len(costs) == 1 else min(costs, key=lambda each: each.rank)
