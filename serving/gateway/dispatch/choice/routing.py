"""Decides where a request goes: canary, version and engine, and when it leaves an engine.

The choices on a request's way are made in this order:

1. `choose_canary`: whether the canary of the model takes it;
2. `choose_version`: which version does, while a model is being replaced and both versions have
   engines; the request belongs to that one for its whole life;
3. `choose_engine`: which engine of the version;
4. `to_migrate`: whether it leaves an engine that drains.

Pure: no clock, no I/O, no chance.
"""

import hashlib
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.domain.capacity.choice_costs import (
    AS_GOOD_TOKENS,
    DRAWN_FROM,
    SAME_TOKENS,
    busy_tokens,
    first_token_cost,
    whole_cost,
)
from serving.gateway.dispatch.choice.engine_table import (
    Column,
    EngineColumns,
    any_of,
    least_of,
    uncached_tokens,
)
from serving.gateway.dispatch.known_room import Need
from serving.gateway.dispatch.requests import EngineConnection, InFlightRequest
from serving.gateway.telemetry.request_story import Because, EngineChoice

Rows = NDArray[np.intp]  # places of engines in the columns

# The first bytes of a digest as a number: 2^64 steps between 0 and 1.
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class CanaryView:
    """The canary of the requested model. `weight` is its share of requests, 0 to 1."""

    name: str
    version: str
    weight: float
    num_ready: int


@dataclass(frozen=True, slots=True)
class CanaryChoice:
    """The decision whether the canary takes the request, and its reason."""

    is_taken: bool
    reason: str


def choose_canary(key: str, canary: CanaryView) -> CanaryChoice:
    """Decides whether `key` lies in the canary's share of all keys, and the canary can take it.

    A key has one place for each canary version, the same on every gateway. So a user of the canary
    stays with it when the weight is raised. Another version draws other users. A canary without a
    ready engine takes nothing.
    """
    if canary.num_ready == 0:
        return CanaryChoice(is_taken=False, reason=f"{canary.name} has no ready engine")
    is_taken = _place(key, canary) < canary.weight
    where = "in" if is_taken else "not in"
    return CanaryChoice(is_taken, f"{where} the {canary.weight:.2%} of {canary.name}")


def _place(key: str, canary: CanaryView) -> float:
    """Returns where the key lies, from 0 to below 1, for this canary version."""
    text = f"{canary.name}\0{canary.version}\0{key}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "big")
    return number / (1 << 8 * _HASH_BYTES)


@dataclass(frozen=True, slots=True)
class VersionView:
    """The view of one version of one model at this gateway.

    `num_ready` are the engines that take requests now. `is_current` means that the configuration
    names it; all others are on their way out.
    """

    version: str
    num_ready: int
    num_in_flight: int
    is_current: bool


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """The version chosen (`None`: the request waits), and the reason."""

    version: str | None
    reason: str


def choose_version(versions: Iterable[VersionView]) -> VersionChoice:
    """Chooses the version with the fewest requests in flight per ready engine.

    Among equals the current one is chosen. So each version takes what its engines can carry while
    their number changes. A version without a ready engine takes nothing.
    """
    ready = [version for version in versions if version.num_ready > 0]
    if not ready:
        return VersionChoice(None, "no version has a ready engine")
    best = min(
        ready,
        key=lambda view: (view.num_in_flight / view.num_ready, not view.is_current, view.version),
    )
    if len(ready) == 1:
        return VersionChoice(best.version, "the only version with a ready engine")
    load = best.num_in_flight / best.num_ready
    return VersionChoice(best.version, f"fewest in flight per ready engine ({load:.2f})")


@dataclass(frozen=True, slots=True)
class Route:
    """The engine chosen and what decided it, or no engine: the request waits, and why in words.

    Where a request waits, `is_open_to_others` means that an engine may have another one now,
    `is_kept` that this is what is kept for others, and `awaited_id` is the engine that it waits for
    because it takes less there, though another has room; `None` if it is none of them.

    `first_token_cost` is what it takes there until its first token, in tokens of prompts.
    """

    engine_id: str | None
    because: Because | None = None
    why_waiting: str = ""
    first_token_cost: int = 0
    is_open_to_others: bool = False
    is_kept: bool = False
    awaited_id: str | None = None

    @classmethod
    def to(cls, engine_id: str, because: Because, first_token_cost: int) -> "Route":
        """Returns the way to an engine."""
        return cls(engine_id, because, first_token_cost=first_token_cost)

    @classmethod
    def wait(cls, why: str, *, is_open_to_others: bool = False, is_kept: bool = False) -> "Route":
        """Returns that it waits for any engine."""
        return cls(None, None, why, is_open_to_others=is_open_to_others, is_kept=is_kept)

    @classmethod
    def wait_for(cls, engine_id: str) -> "Route":
        """Returns that it waits for this engine, and others may have what is free."""
        why = f"waits for {engine_id}, where it takes less"
        return cls(None, None, why, is_open_to_others=True, awaited_id=engine_id)


def choice_of(
    connection: EngineConnection, need: Need, because: Because, num_engines: int
) -> EngineChoice:
    """Returns how an engine was chosen, with what was known of it before it gets the request."""
    room = connection.room
    return EngineChoice(
        because,
        num_engines,
        num_tokens=need.num_tokens,
        expected_cached=need.num_cached,
        line_tokens=0 if room is None else room.backlog_tokens,
        num_in_flight=len(connection.requests) if room is None else room.num_sequences,
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """What the choice of an engine asks of a request.

    It needs `need`; `cached` tokens of it are in the caches of these engines, `None` if that cannot
    be known. A request that `needs_isolation` does not join those of `isolated`, engines with
    another suspect. One that `leaves_room` does not take what is kept for others. `number` is
    another one for each request of a gateway, and differs between gateways. `spread_tokens` of it
    are to come into another cache, and so count as cached everywhere in what it takes. One that
    `was_on_engine` may have places that are kept for such ones.
    """

    need: Need
    cached: dict[str, int] | None = None
    needs_isolation: bool = False
    isolated: Container[str] = ()
    leaves_room: bool = False
    number: int = 0
    spread_tokens: int = 0
    was_on_engine: bool = False


def choose_engine(columns: EngineColumns, rows: dict[str, int], wish: Wish) -> Route:
    """Chooses, of the engines with room, the one on which the request takes least.

    `rows` has the places of engines in the columns. Where it takes less on one that has more of it
    cached and has room only soon, with the line there, it waits for that.

    Among equals it is the one with the fewest requests in flight, then the least used so far; of
    many engines any that is as good. An engine that drains is chosen only where there is no other
    and it is not leaving yet: the request has been admitted already, and has nowhere else to go. A
    request that needs isolation never joins another isolated one. One that stands still gets
    nothing while another engine may.
    """
    candidates = ~columns.is_draining
    if not any_of(candidates):
        candidates = ~columns.is_leaving
    if columns.has_late and any_of(at_work := candidates & ~columns.is_late):
        candidates = at_work
    if not any_of(candidates):
        return Route.wait("no engine is ready")
    if wish.needs_isolation:
        is_free = [engine_id not in wish.isolated for engine_id in columns.engine_ids]
        candidates = candidates & np.array(is_free)
        if not any_of(candidates):
            return Route.wait("every engine has an isolated request", is_open_to_others=True)
    need = wish.need
    uncached = uncached_tokens(columns, rows, need, wish.cached)
    has_kv = columns.is_empty | (columns.kv_tokens >= uncached + need.num_expected)
    has_place = columns.has_place_for_moved if wish.was_on_engine else columns.has_place
    has_room = candidates & has_place & has_kv
    with_room = has_room & ~columns.is_kept if wish.leaves_room else has_room
    if not any_of(with_room):
        if any_of(has_room):
            reason = "the room that is left is kept for others"
            return Route.wait(reason, is_open_to_others=True, is_kept=True)
        is_open = any_of(candidates & has_place)
        return Route.wait("no engine has room for it", is_open_to_others=is_open)
    line, count, num_expected = columns.backlog_tokens, columns.num_in_flight, need.num_expected
    to_first = first_token_cost(line, count, uncached)
    own_costs = costs = whole_cost(to_first, count, uncached, num_expected)
    left = uncached
    if wish.spread_tokens:
        left = np.minimum(uncached, max(1, need.num_tokens - wish.spread_tokens))
        costs = whole_cost(first_token_cost(line, count, left), count, left, num_expected)
    (compared,) = with_room.nonzero()
    is_soon = candidates & columns.has_full_line
    if any_of(is_soon):
        # Not for fewer sequences alone: new engines have few, and all would wait for their lines.
        (soon,) = (is_soon & (left < least_of(left[compared]))).nonzero()
        if len(soon) and least_of(costs[soon]) + SAME_TOKENS < least_of(costs[compared]):
            return Route.wait_for(columns.engine_ids[_least(columns, costs, soon)])
    best = _best(columns, costs, left, compared, wish.number)
    if len(compared) == 1:
        because = Because.ONLY_ONE
    elif wish.spread_tokens and best not in _as_good(columns, own_costs, compared):
        because = Because.SPREAD
    else:
        because = _because(columns, compared, best, uncached, num_expected)
    return Route.to(columns.engine_ids[best], because, int(to_first[best]))


def _because(
    columns: EngineColumns, compared: Rows, best: int, uncached: Column, num_expected: int
) -> Because:
    """Returns what decided, of several that were compared."""
    left, line = uncached[compared], columns.backlog_tokens[compared]
    count = columns.num_in_flight[compared]
    line_of_best, count_of_best = columns.backlog_tokens[best], columns.num_in_flight[best]
    less_cached = left >= uncached[best] + SAME_TOKENS
    if any_of(less_cached):
        busy = least_of(busy_tokens(line, count, num_expected)[less_cached])
        if busy < busy_tokens(int(line_of_best), int(count_of_best), num_expected) + SAME_TOKENS:
            return Because.CACHED
    if line[line.argmax()] >= line_of_best + SAME_TOKENS:
        return Because.LEAST_TO_DO
    has_more = count[count.argmax()] > count_of_best
    return Because.FEWEST_IN_FLIGHT if has_more else Because.LEAST_USED


def _best(columns: EngineColumns, costs: Column, left: Column, rows: Rows, number: int) -> int:
    """Returns the row of one that takes no more than others; of such ones, that has least `left`.

    Those are the tokens that it has to compute.
    """
    as_good = _as_good(columns, costs, rows)
    if len(as_good) == 1:
        return int(as_good[0])
    of_rows = left[as_good]
    as_good = as_good[of_rows == least_of(of_rows)]
    return int(as_good[number % len(as_good)])


def _as_good(columns: EngineColumns, costs: Column, rows: Rows) -> Rows:
    """Returns the row of the one that takes least, of few; of many, of all that are as good."""
    if len(rows) <= DRAWN_FROM:
        return np.array([_least(columns, costs, rows)])
    of_rows = costs[rows]
    as_good: Rows = rows[of_rows < least_of(of_rows) + AS_GOOD_TOKENS]
    return as_good


def _least(columns: EngineColumns, costs: Column, rows: Rows) -> int:
    """Returns the row of the one that takes least, of some."""
    for column in (costs // SAME_TOKENS, columns.num_in_flight, columns.num_dispatched):
        if len(rows) == 1:
            break
        of_rows = column[rows]
        rows = rows[of_rows == least_of(of_rows)]
    return int(min(rows, key=lambda row: columns.engine_ids[row]) if len(rows) > 1 else rows[0])


def to_migrate(
    requests: Iterable[InFlightRequest], now_s: float, until_s: float
) -> list[InFlightRequest]:
    """Returns the requests that will not have finished by `until_s`, at each one's own pace so far.

    A request that can finish in time stays: moving it would cost a prefill for nothing. The others
    move at once, because each step on an engine that is going has to be computed again in the
    prefill elsewhere. A request without a bound on its tokens, or without a token yet, is one of
    them.
    """
    return [request for request in requests if not _finishes(request, now_s, until_s)]


def _finishes(request: InFlightRequest, now_s: float, until_s: float) -> bool:
    produced = request.num_tokens_since_dispatch
    if request.max_tokens is None or produced <= 0 or now_s >= until_s:
        return False
    pace_s = max(now_s - request.dispatched_at_s, 0.0) / produced
    return now_s + (request.max_tokens - len(request.emitted)) * pace_s <= until_s
