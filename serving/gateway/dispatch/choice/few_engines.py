"""The choice of an engine where there are few of them, one after the other.

It is `routing.choose_engine`, decision by decision and word by word, which looks at all engines at
once: of so few its arrays cost several times what they save. One test holds both to the same plain
rule. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.domain.capacity.choice_costs import (
    SAME_TOKENS,
    busy_tokens,
    first_token_cost,
    whole_cost,
)
from serving.gateway.dispatch.choice.engine_table import (
    UNBOUNDED,
    EngineColumns,
    EngineTable,
    any_of,
    uncached_tokens,
)
from serving.gateway.dispatch.choice.routing import Route, Wish, choose_engine
from serving.gateway.dispatch.first_token_times import FirstTokenCosts
from serving.gateway.dispatch.known_room import Need
from serving.gateway.dispatch.requests import EngineConnection
from serving.gateway.telemetry.request_story import Because

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
    has_place_for_moved: bool
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
            room_of = (0, UNBOUNDED, 1.0, True, True, False, False, False)
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
            room.has_place_for_moved,
            count == 0,
            room.is_kept_free,
            room.has_full_line,
            *moment,
        )

    def is_open_to(self, wish: Wish) -> bool:
        """Returns whether it has a place for a request, if not any."""
        return self.has_place_for_moved if wish.was_on_engine else self.has_place


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

    def least_costs(
        self, need: Need, cached: dict[str, int] | None, now_s: float
    ) -> FirstTokenCosts | None:
        """Returns what a first token takes on the engines that do not drain, at least.

        `None` without any. `cached` is as `Wish` has it.
        """
        columns, rows = self._table.columns(now_s), self._table.rows
        ready = ~columns.is_draining
        if not any_of(ready):
            return None
        uncached = uncached_tokens(columns, rows, need, cached)
        least = int(uncached[ready].min())
        costs = first_token_cost(columns.backlog_tokens, columns.num_in_flight, uncached)
        alone = first_token_cost(0, 0, least)
        return FirstTokenCosts(int(costs[ready].min()), alone)


class _Costs:
    """What a request takes on an engine."""

    __slots__ = ("engine", "left", "to_first", "total", "uncached")

    def __init__(self, engine: EngineView, wish: Wish) -> None:
        need = wish.need
        if wish.cached is not None and engine.is_known:
            uncached = max(1, need.num_tokens - wish.cached.get(engine.engine_id, 0))
        else:
            uncached = round(need.num_tokens * engine.computed_ratio)
        self.engine, self.uncached = engine, uncached
        line_tokens, count = engine.backlog_tokens, engine.num_in_flight
        self.to_first = to_first = first_token_cost(line_tokens, count, uncached)
        if wish.spread_tokens:
            uncached = min(uncached, max(1, need.num_tokens - wish.spread_tokens))
            to_first = first_token_cost(line_tokens, count, uncached)
        self.left = uncached
        self.total = whole_cost(to_first, count, uncached, need.num_expected)

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """Sorts engines, the best one first."""
        engine = self.engine
        total = self.total // SAME_TOKENS
        return total, engine.num_in_flight, engine.num_dispatched, engine.engine_id

    def has_room(self, wish: Wish) -> bool:
        """Returns whether the engine can have the request now."""
        engine = self.engine
        has_kv = engine.is_empty or engine.kv_tokens >= self.uncached + wish.need.num_expected
        return has_kv and engine.is_open_to(wish)


def choose_of_few(engines: Sequence[EngineView], wish: Wish) -> Route:
    """Chooses as `routing.choose_engine` does; of `MOST_ENGINES` at most."""
    candidates = [each for each in engines if not each.is_draining]
    candidates = candidates or [each for each in engines if not each.is_leaving]
    candidates = [each for each in candidates if not each.is_late] or candidates
    if not candidates:
        return Route.wait("no engine is ready")
    if wish.needs_isolation:
        candidates = [each for each in candidates if each.engine_id not in wish.isolated]
        if not candidates:
            return Route.wait("every engine has an isolated request", is_open_to_others=True)
    costs = [_Costs(each, wish) for each in candidates]
    has_room = [each for each in costs if each.has_room(wish)]
    with_room = has_room
    if wish.leaves_room:
        with_room = [each for each in has_room if not each.engine.is_kept]
    if not with_room:
        if has_room:
            reason = "the room that is left is kept for others"
            return Route.wait(reason, is_open_to_others=True, is_kept=True)
        is_open = any(each.is_open_to(wish) for each in candidates)
        return Route.wait("no engine has room for it", is_open_to_others=is_open)
    least_left = min(each.left for each in with_room)
    if soon := [each for each in costs if each.engine.has_full_line and each.left < least_left]:
        least = min(each.total for each in with_room)
        if min(each.total for each in soon) + SAME_TOKENS < least:
            return Route.wait_for(_best(soon).engine.engine_id)
    best = _best(with_room)
    because = Because.ONLY_ONE
    if len(with_room) > 1:
        because = _because(with_room, best, wish)
    return Route.to(best.engine.engine_id, because, best.to_first)


def _because(costs: list[_Costs], best: _Costs, wish: Wish) -> Because:
    """Returns what decided, of several."""
    if wish.spread_tokens:
        without = replace(wish, spread_tokens=0)
        costs = [_Costs(each.engine, without) for each in costs]
        engine, best = best.engine, _best(costs)
        if best.engine is not engine:
            return Because.SPREAD
    at, most_uncached, num_expected = (
        best.engine,
        best.uncached + SAME_TOKENS,
        wish.need.num_expected,
    )
    line, count = at.backlog_tokens, at.num_in_flight
    busy = busy_tokens(line, count, num_expected) + SAME_TOKENS
    is_line_longer = has_more = False
    for each in costs:
        other_line, other_count = each.engine.backlog_tokens, each.engine.num_in_flight
        is_less_cached = each.uncached >= most_uncached
        if is_less_cached and busy_tokens(other_line, other_count, num_expected) < busy:
            return Because.CACHED
        is_line_longer |= other_line >= line + SAME_TOKENS
        has_more |= other_count > count
    if is_line_longer:
        return Because.LEAST_TO_DO
    return Because.FEWEST_IN_FLIGHT if has_more else Because.LEAST_USED


def _best(costs: list[_Costs]) -> _Costs:
    return costs[0] if len(costs) == 1 else min(costs, key=lambda each: each.rank)
