"""The choice of an engine as one would write it down.

Held against the product's: that of all engines at once, and that of few one after the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.gateway.dispatch.choice.engine_table import EngineColumns
from serving.gateway.dispatch.choice.few_engines import EngineView, choose_of_few
from serving.gateway.dispatch.choice.routing import Route, Wish, choose_engine
from serving.gateway.dispatch.known_room import Need
from serving.gateway.telemetry.request_story import Because

# Of more engines one is drawn of those that are as good.
DRAWN_FROM, AS_GOOD_TOKENS = 8, 1024
SAME_TOKENS, STEP_TOKENS, SEQUENCE_TOKENS, MOST_IN_STEP, FOR_OTHERS = 64, 240, 4, 8192, 2


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known of one engine, and what it has cached of the request: `None` if unknown."""

    engine_id: str
    num_in_flight: int = 0
    num_dispatched: int = 0
    is_draining: bool = False
    is_leaving: bool = False
    has_isolated: bool = False
    backlog_tokens: int = 0
    kv_tokens: int = 1 << 60
    computed_ratio: float = 1.0
    has_place: bool = True
    has_place_for_moved: bool = True
    is_empty: bool = False
    is_kept: bool = False
    has_full_line: bool = False
    is_late: bool = False
    num_cached: int | None = None

    def uncached(self, need: Need) -> int:
        cached = None if self.num_cached is None else min(self.num_cached, need.num_tokens)
        return Need(need.num_tokens, num_cached=cached).num_computed(self.computed_ratio)

    def is_open(self, *, was_on_engine: bool) -> bool:
        return self.has_place_for_moved if was_on_engine else self.has_place

    def has_room(self, need: Need, *, was_on_engine: bool) -> bool:
        takes = self.uncached(need) + need.num_expected
        is_open = self.is_open(was_on_engine=was_on_engine)
        return is_open and (self.is_empty or self.kv_tokens >= takes)

    def first_token_cost(self, computed: int) -> int:
        line = self.backlog_tokens + computed
        num_steps = -(-line // MOST_IN_STEP)
        return line + num_steps * (STEP_TOKENS + SEQUENCE_TOKENS * self.num_in_flight)

    def left(self, need: Need, spread_tokens: int) -> int:
        computed = self.uncached(need)
        if spread_tokens:
            computed = min(computed, max(1, need.num_tokens - spread_tokens))
        return computed

    def cost(self, need: Need, spread_tokens: int) -> int:
        computed = self.left(need, spread_tokens)
        later = need.num_expected * SEQUENCE_TOKENS * self.num_in_flight
        return self.first_token_cost(computed) + FOR_OTHERS * computed + later

    def busy(self, need: Need) -> int:
        """What it has to do besides."""
        return self.backlog_tokens + need.num_expected * SEQUENCE_TOKENS * self.num_in_flight

    def rank(self, need: Need, spread_tokens: int) -> tuple[int, int, int, str]:
        cost = self.cost(need, spread_tokens) // SAME_TOKENS
        return cost, self.num_in_flight, self.num_dispatched, self.engine_id


def as_good(engines: list[Engine], need: Need, spread_tokens: int) -> list[Engine]:
    """The one that takes least, of few; of many, all that take hardly more."""
    if len(engines) <= DRAWN_FROM:
        return [min(engines, key=lambda engine: engine.rank(need, spread_tokens))]
    most = min(each.cost(need, spread_tokens) for each in engines) + AS_GOOD_TOKENS
    return [each for each in engines if each.cost(need, spread_tokens) < most]


def plainly(
    engines: Iterable[Engine],
    need: Need,
    *,
    needs_isolation: bool = False,
    leaves_room: bool = False,
    number: int = 0,
    spread_tokens: int = 0,
    was_on_engine: bool = False,
) -> Route:
    engines = list(engines)
    candidates = [engine for engine in engines if not engine.is_draining]
    candidates = candidates or [engine for engine in engines if not engine.is_leaving]
    candidates = [engine for engine in candidates if not engine.is_late] or candidates
    if not candidates:
        return Route.wait("no engine is ready")
    if needs_isolation:
        candidates = [engine for engine in candidates if not engine.has_isolated]
        if not candidates:
            return Route.wait("every engine has an isolated request", is_open_to_others=True)
    room = [each for each in candidates if each.has_room(need, was_on_engine=was_on_engine)]
    open_room = [engine for engine in room if not (leaves_room and engine.is_kept)]
    if room and not open_room:
        reason = "the room that is left is kept for others"
        return Route.wait(reason, is_open_to_others=True, is_kept=True)
    if not room:
        is_open = any(each.is_open(was_on_engine=was_on_engine) for each in candidates)
        return Route.wait("no engine has room for it", is_open_to_others=is_open)
    good = as_good(open_room, need, spread_tokens)
    least_left = min(each.left(need, spread_tokens) for each in good)
    good = [each for each in good if each.left(need, spread_tokens) == least_left]
    best = good[number % len(good)]
    least_left = min(each.left(need, spread_tokens) for each in open_room)
    full = [engine for engine in candidates if engine.has_full_line]
    soon = [engine for engine in full if engine.left(need, spread_tokens) < least_left]
    if soon:
        least, soonest = (
            min(each.cost(need, spread_tokens) for each in engines) for engines in (open_room, soon)
        )
        if soonest + SAME_TOKENS < least:
            better = min(soon, key=lambda engine: engine.rank(need, spread_tokens))
            return Route.wait_for(better.engine_id)
    cost = best.first_token_cost(best.uncached(need))
    return Route.to(best.engine_id, because(open_room, best, need, spread_tokens), cost)


def because(among: list[Engine], best: Engine, need: Need, spread_tokens: int) -> Because:
    """The first fact that speaks for the best one, against any other."""
    if len(among) == 1:
        return Because.ONLY_ONE
    if spread_tokens and best not in as_good(among, need, 0):
        return Because.SPREAD
    if any(
        each.busy(need) < best.busy(need) + SAME_TOKENS
        and each.uncached(need) >= best.uncached(need) + SAME_TOKENS
        for each in among
    ):
        return Because.CACHED
    if any(each.backlog_tokens >= best.backlog_tokens + SAME_TOKENS for each in among):
        return Because.LEAST_TO_DO
    if any(each.num_in_flight > best.num_in_flight for each in among):
        return Because.FEWEST_IN_FLIGHT
    return Because.LEAST_USED


def chosen(
    engines: Sequence[Engine],
    need: Need = Need(0),  # noqa: B008 - it is frozen
    *,
    needs_isolation: bool = False,
    leaves_room: bool = False,
    number: int = 0,
    spread_tokens: int = 0,
    was_on_engine: bool = False,
) -> Route:
    """What the product chooses of the same."""
    columns = EngineColumns.of(
        [engine.engine_id for engine in engines],
        (engine.num_cached is not None for engine in engines),
    )
    for row, engine in enumerate(engines):
        for name in EngineColumns.__slots__:
            if name not in ("engine_ids", "is_known", "has_late"):
                getattr(columns, name)[row] = getattr(engine, name)
    columns.has_late = any(engine.is_late for engine in engines)
    known = [engine for engine in engines if engine.num_cached is not None]
    cached = {
        engine.engine_id: min(engine.num_cached, need.num_tokens)
        for engine in known
        if engine.num_cached
    }
    wish = Wish(
        need,
        cached if known else None,
        needs_isolation,
        {engine.engine_id for engine in engines if engine.has_isolated},
        leaves_room,
        number,
        spread_tokens,
        was_on_engine,
    )
    rows = {engine.engine_id: row for row, engine in enumerate(engines)}
    route = choose_engine(columns, rows, wish)
    if len(engines) <= DRAWN_FROM:  # of more, one is drawn
        assert choose_of_few([view_of(engine) for engine in engines], wish) == route
    return route


def view_of(engine: Engine) -> EngineView:
    names = [name for name in EngineView.__slots__ if name != "is_known"]
    facts = {name: getattr(engine, name) for name in names}
    return EngineView(is_known=engine.num_cached is not None, **facts)
