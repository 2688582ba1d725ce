"""The hot loop: requests, the gateway's routing and the engines' steps, compiled.

Owns what happens between two changes of the fleet: arrivals, waiting at the gateway, the choice of
an engine, continuous batching, and the move of requests off an engine. Does not own when engines
come and go (`slices`). Pure: no clock, no I/O, no chance.

Every step of the law of `serving.domain.capacity` is honoured, but not every step is an event.
While an engine only decodes, its steps are equally long, so the kernel leaps to the step after
which a sequence ends or at which an arrival is taken in. Steps that compute prompts are events of
their own. Nothing is averaged: a simulation step by step gives the same instants up to rounding.

A step takes in, as vLLM's scheduler does, one token for each running sequence and then prompts in
order of arrival, up to `max_num_batched_tokens` in all and `max_num_seqs` sequences. The step that
computes the last of a prompt gives its first token. Not modelled: the size of the KV cache, and
prefix caching (give input tokens without what the cache saves).

A request waits at the gateway until an engine has room for it, and then goes where it takes least,
as gateways choose (`serving.gateway.dispatch.choice`, which a test holds `choose` to). There is one
gateway here, which knows of each engine what there is at that moment; nothing is cached, tenants
are one, and what will not begin in time waits until its deadline, where a real gateway refuses it.
What is overdue waits behind what can be in time (`overdue`; of these who came first is looked at
first, at gateways who is due first), and an engine has no more sequences than keep the objective
for later tokens (`step_places`, both in `serving.domain.capacity`), but for what had an engine
before.

The lines of batches are requests behind all others. They come when there is room: as many at once
as their batch may have, each on the engine with the fewest in flight, if that has a place and no
prompt in line. A line that leaves its engine goes back to its batch. A real gateway has lines leave
for requests that find no place; here those wait until a sequence ends.

The arrays are the state. Requests are known by their index, engines by their slot, queues are
linked through `link`, and `NOBODY` ends them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# Any: whatever the compiled function takes and returns.
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Array indices cannot be `None`.
NOBODY = -1

# Values of `Kernel.status`.
PENDING, SERVED, FAILED, REFUSED = 0, 1, 2, 3

# Values of `Kernel.mode`: nothing to do, equal steps without prompts, one step with prompts.
IDLE, DECODING, MIXED = 0, 1, 2

_ROUNDING = 1e-6

# More than any cost.
_NEVER = 1 << 62

# Rows of `Kernel.parked_head`: what had an engine is before all others, and what is overdue has
# turns behind them.
MOVED, IN_TIME, OVERDUE = 0, 1, 2
NUM_ROWS = 3

# Indices of `Kernel.counts`.
ARRIVED, INPUT_TOKENS, FINISHED, OUTPUT_TOKENS = 0, 1, 2, 3
ROUTABLE, PARKED, LEAVING, EXPECTED_TOKENS, ON_ENGINES, MOVES = 4, 5, 6, 7, 8, 9
FIRST_TOKENS, LATE = 10, 11
# The index of the first line, and batches: those that are over come first, then those that are
# open. Of lines: those on engines, those that ended, and tokens of these.
LINES_FROM, BATCHES_OVER, BATCHES_KNOWN = 12, 13, 14
LINES_ON_ENGINES, LINES_FINISHED, LINES_INPUT_TOKENS, LINES_OUTPUT_TOKENS = 15, 16, 17, 18
# Answers with two tokens or more, and those of them that were slower than their objective.
PACED, SLOW = 19, 20
# The work of those that can be in time, while something is overdue that has had no part of it yet.
OTHERS_WORK = 21
NUM_COUNTS = 22

# Indices of `Kernel.full_s`: since when there is work that waits for room, infinite while there is
# none, and for how long there was before.
FULL_SINCE, FULL_BEFORE = 0, 1

# An entry of `Kernel.ends` is the step at which a sequence ends, then the request.
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


def _compiled(function: _Function) -> _Function:
    """Compiles at the first call, and keeps the result beside the source for the next process.

    What is kept is compiled anew when its own file changes, and not when that of what it calls
    does: so all of it is in this file, and constants of others come in as arguments.
    """
    return cast(_Function, njit(cache=True)(function))


def _inlined(function: _Function) -> _Function:
    """Compiles as `_compiled` does, into whatever calls it: a call copies what it is given."""
    return cast(_Function, njit(cache=True, forceinline=True)(function))


class GatewayBounds(NamedTuple):
    """The gateway's limits, times in seconds, and the constants of its choice (`choice_costs`).

    Then those by which turns are dealt (`overdue`; an output token counts `output_weight` as much
    work as one of a prompt) and engines are bounded (`step_places`). A token may take `token_s` on
    average, infinite without an objective.
    """

    request_deadline_s: float
    max_waiting_requests: int
    step_tokens: int
    sequence_tokens: int
    most_in_step: int
    for_others: int
    same_tokens: int
    drawn_from: int
    as_good_tokens: int
    wait_share: float
    overdue_part: int
    output_weight: float
    token_s: float
    look_s: float
    half_life_s: float
    least_busy_s: float
    least_of: int
    open_s: float


# The rows of `Kernel`'s tables. They are few tables of wide rows, and not an array for each column,
# because a compiled function copies a description of every array that it is given, at each call:
# with fifty of them that was nine tenths of the time.
REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),
        ("allowed_s", np.float32),
        ("allowed_more_s", np.float32),
        ("input_tokens", np.int32),
        ("output_tokens", np.int32),
        ("left", np.int32),
        ("link", np.int32),
        ("first_s", np.float32),
        ("last_s", np.float32),
        ("stall_s", np.float32),
        ("parked_s", np.float32),
        ("moves", np.int16),
        ("status", np.int8),
    ],
    align=True,
)
ENGINE = np.dtype(
    [
        ("step", np.int64),
        ("anchor_s", np.float64),
        ("step_s", np.float64),
        ("event_s", np.float64),
        ("event_steps", np.int64),
        ("line_tokens", np.int64),
        ("dispatched", np.int64),
        ("leave_by_s", np.float64),
        ("emitted", np.int64),
        ("computed", np.int64),
        ("busy_s", np.float64),
        ("base_s", np.float64),
        ("per_sequence_s", np.float64),
        ("per_prompt_token_s", np.float64),
        ("max_num_seqs", np.int32),
        ("max_num_batched_tokens", np.int32),
        ("running", np.int32),
        ("in_flight", np.int32),
        ("head", np.int32),
        ("tail", np.int32),
        ("head_done", np.int32),
        ("event_at", np.int32),
        ("route_at", np.int32),
        ("mode", np.int8),
        ("places", np.int32),
        ("seen_step", np.int64),
        ("seen_emitted", np.int64),
        ("seen_busy_s", np.float64),
        ("seen_s", np.float64),
        ("open_until_s", np.float64),
        ("lately_steps", np.float64),
        ("lately_emitted", np.float64),
        ("lately_busy_s", np.float64),
    ],
    align=True,
)
BATCH = np.dtype(
    [
        ("next", np.int32),
        ("end", np.int32),
        ("back", np.int32),
        ("limit", np.int32),
        ("on_engines", np.int32),
    ]
)
# Any: rows have their fields as attributes in compiled code only.
Rows = npt.NDArray[Any]


class Kernel(NamedTuple):
    """The whole state, changed in place.

    Per request: `first_s` and `last_s` are its first and last token after its arrival (NaN without
    one), `allowed_s` is the longest `first_s` of its objective and `allowed_more_s` the longest
    time from that to `last_s`, `left` the tokens still to give,
    `stall_s` how long its stream stood still because it had to move, `parked_s` when it began to
    wait at the gateway, after its arrival. Per engine: `step`
    counts its finished steps as of `anchor_s`; at `event_s` another `event_steps` of `step_s` each
    are done. `ends` is a heap per engine over its `running` sequences; the queue from `head` to
    `tail` has no prompt computed but `head_done` tokens of the first, and `line_tokens` of prompts
    are in no step yet. `event_heap` holds every slot by `event_s`; the first `counts[ROUTABLE]` of
    `routable` take requests, and `route_at` is the place among them or `NOBODY`. One that drains,
    and has requests that no other had room for, may keep them until `leave_by_s`, infinite for any
    other. `emitted` output tokens and `computed`
    prompt tokens are sums since it opened, and so is `busy_s`, the time in its finished steps.
    `base_s` and the four after it are its law. Per line: `batch_of`. Per batch: the lines from
    `next` to `end` have not begun, those that came back are linked from `back`, and of `on_engines`
    there may be `limit`. What waits at the gateway is linked from `parked_head` to `parked_tail`,
    in rows for what had an engine, for what can be in time and for what is overdue; `full_s` is for
    how long some did while there were engines. An engine may have `places` sequences, by what it
    did since `seen_s`.
    """

    requests: Rows
    engines: Rows
    batches: Rows
    batch_of: I32
    ends: I64
    event_heap: I32
    routable: I32
    parked_head: I32
    parked_tail: I32
    counts: I64
    full_s: F64


@_compiled
def advance(k: Kernel, bounds: GatewayBounds, until_s: float) -> None:
    """Lets everything happen that is due by `until_s`; of equal instants engines come first."""
    counts = k.counts
    num_requests = counts[LINES_FROM]
    while True:
        slot = k.event_heap[0]
        engine = k.engines[slot]
        engine_s = engine.event_s
        arrived = counts[ARRIVED]
        arrival_s = k.requests[arrived].arrival_s if arrived < num_requests else np.inf
        expiry_s = _first_expiry_s(k, bounds) if counts[PARKED] else np.inf
        if min(engine_s, arrival_s, expiry_s) > until_s:
            return
        if engine_s <= arrival_s and engine_s <= expiry_s:
            if engine_s == np.inf:
                return
            engine.step += engine.event_steps
            engine.emitted += engine.event_steps * engine.running
            engine.busy_s += engine.event_steps * engine.step_s
            if engine_s - engine.seen_s >= bounds.look_s:
                look_at_steps(k, bounds, slot, engine_s)
            _begin_step(k, slot, engine_s)
            # Asked here already: calls are most of what a step costs.
            is_wanted = counts[PARKED] or counts[LEAVING]
            num_moves = int(k.parked_head[MOVED] != NOBODY)
            if is_wanted and (engine.route_at == NOBODY or has_place(k, slot, num_moves)):
                _use_room(k, bounds, engine_s)
            if counts[BATCHES_OVER] < counts[BATCHES_KNOWN]:
                give_lines(k, engine_s)
        elif expiry_s <= arrival_s:
            _expire_oldest(k, expiry_s)
        else:
            counts[ARRIVED] += 1
            counts[INPUT_TOKENS] += k.requests[arrived].input_tokens
            if counts[ROUTABLE] == 0 and counts[PARKED] >= bounds.max_waiting_requests:
                k.requests[arrived].status = REFUSED
            else:
                _enter(k, bounds, arrived, arrival_s)
                # Another engine may have the fewest now.
                if counts[BATCHES_OVER] < counts[BATCHES_KNOWN]:
                    give_lines(k, arrival_s)


@_compiled
def open_engine(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float) -> None:
    """Opens an empty engine. It takes requests from now on, at first those that wait."""
    engine = k.engines[slot]
    engine.step = 0
    engine.emitted = 0
    engine.computed = 0
    engine.busy_s = 0.0
    engine.running = 0
    engine.head = NOBODY
    engine.head_done = 0
    engine.line_tokens = 0
    engine.in_flight = 0
    engine.dispatched = 0
    engine.leave_by_s = np.inf
    engine.mode = IDLE
    engine.places = engine.max_num_seqs
    engine.seen_step = 0
    engine.seen_emitted = 0
    engine.seen_busy_s = 0.0
    engine.seen_s = now_s
    engine.open_until_s = -np.inf
    engine.lately_steps = 0.0
    engine.lately_emitted = 0.0
    engine.lately_busy_s = 0.0
    place = k.counts[ROUTABLE]
    k.counts[ROUTABLE] += 1
    k.routable[place] = slot
    engine.route_at = place
    _use_room(k, bounds, now_s)
    give_lines(k, now_s)


@_compiled
def give_lines(k: Kernel, now_s: float) -> None:
    """Gives lines to engines that have room, the batches that are due first first."""
    if k.counts[PARKED]:
        return
    for batch in range(k.counts[BATCHES_OVER], k.counts[BATCHES_KNOWN]):
        its = k.batches[batch]
        while its.on_engines < its.limit:
            slot = _fewest_in_flight(k)
            if slot == NOBODY:
                return
            engine = k.engines[slot]
            if engine.head != NOBODY or engine.in_flight >= engine.places:
                return
            line = its.back
            if line != NOBODY:
                its.back = k.requests[line].link
            elif its.next < its.end:
                line = its.next
                its.next += 1
            else:
                break
            its.on_engines += 1
            k.counts[LINES_ON_ENGINES] += 1
            _put(k, line, slot, now_s)


@_compiled
def stop_routing(k: Kernel, slot: int, now_s: float) -> None:
    """Sends the engine no more requests; what it has goes on."""
    engine = k.engines[slot]
    place = engine.route_at
    k.counts[ROUTABLE] -= 1
    moved = k.routable[k.counts[ROUTABLE]]
    k.routable[place] = moved
    k.engines[moved].route_at = place
    engine.route_at = NOBODY
    _look_full(k, now_s)


@_compiled
def leave(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float, until_s: float) -> None:
    """Moves what will not have finished by `until_s` off an engine that gets no more requests.

    What no other engine has room for stays as long as it may, for this one still works.
    """
    _stop_leaving(k, slot)
    is_over = now_s >= until_s
    if is_over or not k.counts[PARKED]:
        is_over = not _move_off(k, bounds, slot, now_s, until_s)
    if not is_over:
        k.engines[slot].leave_by_s = until_s
        k.counts[LEAVING] += 1


@_compiled
def _stop_leaving(k: Kernel, slot: int) -> None:
    engine = k.engines[slot]
    if engine.leave_by_s < np.inf:
        engine.leave_by_s = np.inf
        k.counts[LEAVING] -= 1


@_compiled
def close_engine(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float) -> None:
    """Ends an engine that gets no more requests: all that it has goes elsewhere, or waits."""
    _stop_leaving(k, slot)
    _move_off(k, bounds, slot, now_s, now_s)
    _serve(k, bounds, now_s)


@_compiled
def _use_room(k: Kernel, bounds: GatewayBounds, now_s: float) -> None:
    """Fills what engines have room for: with those that wait, then with those that are to move."""
    _serve(k, bounds, now_s)
    if k.counts[PARKED] or not k.counts[LEAVING]:
        return
    for slot in range(len(k.engines)):
        until_s = k.engines[slot].leave_by_s
        if until_s < np.inf and not _move_off(k, bounds, slot, now_s, until_s):
            _stop_leaving(k, slot)


@_compiled
def _move_off(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float, until_s: float) -> bool:
    """Moves what will not have finished by then off an engine, as far as others have room for it.

    Once it is `until_s` all of it goes, in order of arrival. Tokens given so far are computed again
    with the prompt; a step in progress is lost to those that go. Returns whether some are left that
    are to go.
    """
    engine = k.engines[slot]
    if engine.in_flight == 0:
        return False
    whole_steps = 0
    if engine.mode == DECODING:
        whole_steps = int((now_s - engine.anchor_s) / engine.step_s)
        whole_steps = min(whole_steps, engine.event_steps - 1)
    done = engine.step + whole_steps
    leaving = _unfinished(k, slot, done, now_s, until_s)
    first_line = np.searchsorted(leaving, k.counts[LINES_FROM])
    num_moved = first_line
    if now_s < until_s:
        num_moved = _num_fitting(k, leaving[:first_line])
        if num_moved == 0 and first_line:
            return True
    # Lines always go: they are put back last first, so that the first one goes first again.
    first_kept = leaving[num_moved] if num_moved < first_line else k.counts[LINES_FROM]
    _take_from_queue(k, slot, first_kept)
    kept = 0
    for place in range(engine.running):
        entry = k.ends[slot, place]
        to_give = (entry >> _SHIFT) - done
        request = entry & _MASK
        is_finishing = now_s + to_give * _pace_s(k, slot) <= until_s
        if is_finishing or first_kept <= request < k.counts[LINES_FROM]:
            k.ends[slot, kept] = entry
            kept += 1
            _end_up(k, slot, kept - 1)
        else:
            _interrupt(k, slot, request, to_give, now_s)
    engine.in_flight -= num_moved + len(leaving) - first_line
    engine.running = kept
    _go_on(k, slot, now_s, whole_steps)
    k.counts[ON_ENGINES] -= num_moved
    k.counts[MOVES] += num_moved
    for place in range(len(leaving) - 1, first_line - 1, -1):
        line = leaving[place]
        its = k.batches[k.batch_of[line - k.counts[LINES_FROM]]]
        asked = k.requests[line]
        asked.moves += 1
        asked.link = its.back
        its.back = line
        its.on_engines -= 1
        k.counts[LINES_ON_ENGINES] -= 1
    for request in leaving[:num_moved]:
        k.requests[request].moves += 1
        _enter(k, bounds, request, now_s)
    give_lines(k, now_s)
    return bool(num_moved < first_line)


@_compiled
def _pace_s(k: Kernel, slot: int) -> float:
    engine = k.engines[slot]
    return float(engine.base_s + engine.per_sequence_s * engine.running)


@_compiled
def _unfinished(k: Kernel, slot: int, done: int, now_s: float, until_s: float) -> I32:
    """Returns what an engine has that will not have finished by then, in order of arrival."""
    engine = k.engines[slot]
    found = np.empty(engine.in_flight, np.int32)
    count = 0
    request = engine.head
    while request != NOBODY:
        found[count] = request
        count += 1
        request = k.requests[request].link
    pace_s = _pace_s(k, slot)
    for place in range(engine.running):
        entry = k.ends[slot, place]
        if now_s + ((entry >> _SHIFT) - done) * pace_s > until_s:
            found[count] = entry & _MASK
            count += 1
    return np.sort(found[:count])


@_compiled
def _num_fitting(k: Kernel, requests: I32) -> int:
    """Returns how many of the first of these have room on engines that take requests."""
    num = k.counts[ROUTABLE]
    places = np.empty(num, np.int64)
    tokens = np.empty(num, np.int64)
    for at in range(num):
        engine = k.engines[k.routable[at]]
        places[at] = engine.places - engine.in_flight
        tokens[at] = engine.max_num_batched_tokens - engine.line_tokens
    count = 0
    at = 0
    for request in requests:
        while at < num and (places[at] <= 0 or tokens[at] <= 0):
            at += 1
        if at == num:
            break
        places[at] -= 1
        tokens[at] -= _needed(k, request)
        count += 1
    return count


@_compiled
def _take_from_queue(k: Kernel, slot: int, first_kept: int) -> None:
    """Takes what goes out of an engine's queue: lines, and requests before `first_kept`."""
    engine = k.engines[slot]
    request, last = engine.head, NOBODY
    is_first = True
    while request != NOBODY:
        following = k.requests[request].link
        if first_kept <= request < k.counts[LINES_FROM]:
            if last == NOBODY:
                engine.head = request
            else:
                k.requests[last].link = request
            last = request
        else:
            engine.line_tokens -= _needed(k, request)
            if is_first:
                engine.line_tokens += engine.head_done
                engine.head_done = 0
        is_first = False
        request = following
    if last == NOBODY:
        engine.head = NOBODY
    else:
        k.requests[last].link = NOBODY
        engine.tail = last


@_compiled
def _go_on(k: Kernel, slot: int, now_s: float, whole_steps: int) -> None:
    """Has an engine go on with what is left on it, in the step under way."""
    engine = k.engines[slot]
    if engine.mode == DECODING and engine.running:
        engine.event_steps = whole_steps + 1
        _set_event(k, slot, engine.anchor_s + (whole_steps + 1) * engine.step_s)
    elif engine.in_flight == 0:
        engine.mode = IDLE
        _set_event(k, slot, np.inf)
    elif engine.mode == DECODING:
        _begin_step(k, slot, now_s)


@_compiled
def _interrupt(k: Kernel, slot: int, request: int, to_give: int, now_s: float) -> None:
    engine = k.engines[slot]
    asked = k.requests[request]
    is_in_first_step = engine.mode == MIXED and to_give == asked.left
    # What was noted ahead for the end of the step that is now lost is taken back.
    stopped_s = engine.event_s if is_in_first_step else now_s
    asked.left = to_give
    if to_give == asked.output_tokens:
        asked.first_s = np.nan
    else:
        asked.stall_s -= stopped_s - asked.arrival_s


@_compiled
def _enter(k: Kernel, bounds: GatewayBounds, request: int, now_s: float) -> None:
    """Gives a request to an engine, or lets it wait behind its like."""
    if not k.counts[PARKED]:
        slot = choose(k, bounds, request, number_of(request))
        if slot >= 0:
            k.counts[OTHERS_WORK] = 0  # a turn, and nothing is overdue
            k.counts[ON_ENGINES] += 1
            _put(k, request, slot, now_s)
            return
    _park(k, request, now_s)
    _serve(k, bounds, now_s)


@_compiled
def _serve(k: Kernel, bounds: GatewayBounds, now_s: float) -> None:
    """Gives those that wait to engines, the first ones first, as far as there is room."""
    while True:
        row = _row_in_turn(k, bounds, now_s)
        if row == NOBODY:
            break
        request = k.parked_head[row]
        slot = choose(k, bounds, request, number_of(request))
        if slot == NOBODY:
            break
        if row != MOVED:
            _has_turn(k, bounds, row, request)
        _unpark(k, row)
        k.counts[PARKED] -= 1
        k.counts[ON_ENGINES] += 1
        _put(k, request, slot, now_s)
    _look_full(k, now_s)


@_compiled
def _row_in_turn(k: Kernel, bounds: GatewayBounds, now_s: float) -> int:
    """Returns the row whose first is next, or nobody, and puts behind what is overdue by now."""
    while k.parked_head[IN_TIME] != NOBODY:
        asked = k.requests[k.parked_head[IN_TIME]]
        if now_s - asked.arrival_s < bounds.wait_share * asked.allowed_s:
            break
        _append(k, OVERDUE, _unpark(k, IN_TIME))
    if k.parked_head[MOVED] != NOBODY:
        return MOVED
    if k.parked_head[OVERDUE] == NOBODY:
        return IN_TIME if k.parked_head[IN_TIME] != NOBODY else NOBODY
    others = (bounds.overdue_part - 1) * _line_work(k, bounds, k.parked_head[OVERDUE])
    is_their_turn = k.counts[OTHERS_WORK] >= others
    return OVERDUE if is_their_turn or k.parked_head[IN_TIME] == NOBODY else IN_TIME


@_compiled
def _has_turn(k: Kernel, bounds: GatewayBounds, row: int, request: int) -> None:
    """Counts the turn of one that waits, by its work; see `others_work_after`."""
    if k.parked_head[OVERDUE] == NOBODY:
        k.counts[OTHERS_WORK] = 0
        return
    work = _line_work(k, bounds, request)
    if row == OVERDUE:
        less = (bounds.overdue_part - 1) * work
        k.counts[OTHERS_WORK] = max(0, k.counts[OTHERS_WORK] - less)
    else:
        k.counts[OTHERS_WORK] += work


@_compiled
def _line_work(k: Kernel, bounds: GatewayBounds, request: int) -> int:
    """Returns what a request counts that waits for its first engine, as `work_of` does."""
    expected = k.counts[EXPECTED_TOKENS]
    return int(k.requests[request].input_tokens + bounds.output_weight * expected)


@_compiled
def _look_full(k: Kernel, now_s: float) -> None:
    """Notes whether requests wait for room from now on. None waits while an engine has some."""
    is_full = k.counts[PARKED] > 0 and k.counts[ROUTABLE] > 0
    since_s = k.full_s[FULL_SINCE]
    if is_full and since_s == np.inf:
        k.full_s[FULL_SINCE] = now_s
    elif not is_full and since_s < np.inf:
        k.full_s[FULL_BEFORE] += now_s - since_s
        k.full_s[FULL_SINCE] = np.inf


@_compiled
def full_for_s(k: Kernel, now_s: float) -> float:
    """Returns for how long in all requests have waited for room on engines by now."""
    since_s = k.full_s[FULL_SINCE]
    return float(k.full_s[FULL_BEFORE] + (now_s - since_s if since_s < np.inf else 0.0))


@_inlined
def number_of(request: int) -> int:
    """Returns a number that is another one for each request, from 0 to below 2^32."""
    mixed = np.uint64(request + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(mixed >> np.uint64(32))


@_compiled
def look_at_steps(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float) -> None:
    """Bounds an engine's sequences by its steps since the last look, as `Places.after` does."""
    engine = k.engines[slot]
    busy_s = engine.busy_s - engine.seen_busy_s
    kept_share = 0.5 ** (busy_s / bounds.half_life_s)
    num_steps = kept_share * engine.lately_steps + engine.step - engine.seen_step
    num_tokens = kept_share * engine.lately_emitted + engine.emitted - engine.seen_emitted
    busy_s += kept_share * engine.lately_busy_s
    engine.lately_steps, engine.lately_emitted = num_steps, num_tokens
    engine.lately_busy_s = busy_s
    if num_tokens > 0 and busy_s >= bounds.least_busy_s and now_s >= engine.open_until_s:
        most = engine.max_num_seqs
        least = max(1, most // bounds.least_of)
        kept = min(num_tokens / busy_s * bounds.token_s, float(most))
        if busy_s <= bounds.token_s * num_steps:
            more = int(np.ceil((engine.places + kept) / 2 - _ROUNDING))
            engine.places = max(more, engine.places)
        elif kept >= least or num_tokens > 2 * least * num_steps:
            fewer = min(float(engine.places), (kept + min(float(engine.places), 2 * kept)) / 2)
            engine.places = max(int(fewer + _ROUNDING), least)
        elif engine.places <= least:
            engine.places, engine.open_until_s = most, now_s + bounds.open_s
    engine.seen_step, engine.seen_emitted = engine.step, engine.emitted
    engine.seen_busy_s, engine.seen_s = engine.busy_s, now_s


@_inlined
def has_place(k: Kernel, slot: int, num_moves: int) -> bool:
    """Returns whether an engine takes another request, by its sequences and its line.

    One that had an engine before may take any place.
    """
    engine = k.engines[slot]
    has_line = engine.line_tokens >= engine.max_num_batched_tokens
    num_places = engine.max_num_seqs if num_moves else engine.places
    return bool(engine.in_flight < num_places and not has_line)


@_inlined
def choose(k: Kernel, bounds: GatewayBounds, request: int, number: int) -> int:
    """Returns an engine on which a request takes least, of those that have a place for it.

    `NOBODY` if none has a place. Of many engines it is any that is as good, another one for each
    `number`.
    """
    asked = k.requests[request]
    tokens = _needed(k, request)
    given = asked.output_tokens - asked.left
    expected = max(0, k.counts[EXPECTED_TOKENS] - given)
    costs = np.empty(k.counts[ROUTABLE], np.int64)
    routable = k.routable
    least, num = _NEVER, 0
    for at in range(len(costs)):
        slot = routable[at]
        costs[at] = _NEVER
        if has_place(k, slot, asked.moves):
            num += 1
            costs[at] = _cost(k, bounds, slot, tokens, expected)
            least = min(least, costs[at])
    if num == 0:
        return NOBODY
    if num <= bounds.drawn_from:
        return _least_of(k, bounds, costs)
    return _drawn_from(k, costs, least + bounds.as_good_tokens, number)


@_inlined
def _least_of(k: Kernel, bounds: GatewayBounds, costs: I64) -> int:
    """Returns the one that costs least; among equals, that has fewest, or was least used."""
    best, its = NOBODY, (_NEVER, 0, 0, 0)
    for at in range(len(costs)):
        if costs[at] < _NEVER:
            slot = k.routable[at]
            engine = k.engines[slot]
            rank = costs[at] // bounds.same_tokens, engine.in_flight, engine.dispatched, slot
            if rank < its:
                best, its = slot, rank
    return int(best)


@_inlined
def _drawn_from(k: Kernel, costs: I64, below: int, number: int) -> int:
    """Returns one of those that cost less than `below`."""
    count = 0
    for at in range(len(costs)):
        count += costs[at] < below
    to_pass = number % count
    for at in range(len(costs)):
        if costs[at] < below:
            if to_pass == 0:
                return int(k.routable[at])
            to_pass -= 1
    return NOBODY


@_inlined
def _cost(k: Kernel, bounds: GatewayBounds, slot: int, tokens: int, expected: int) -> int:
    """Returns what `choice_costs.whole_cost` does of a request on an engine."""
    engine = k.engines[slot]
    count = engine.in_flight
    line = engine.line_tokens + tokens
    # Faster than whole numbers are divided, and as exact below 2^53.
    num_steps = int(np.ceil(line / bounds.most_in_step))
    to_first = line + num_steps * (bounds.step_tokens + bounds.sequence_tokens * count)
    return int(to_first + bounds.for_others * tokens + expected * bounds.sequence_tokens * count)


@_compiled
def _fewest_in_flight(k: Kernel) -> int:
    """Returns the engine with the fewest requests, of those that take some, or nobody."""
    best, its = NOBODY, (_NEVER, 0, 0)
    for at in range(k.counts[ROUTABLE]):
        slot = k.routable[at]
        engine = k.engines[slot]
        rank = engine.in_flight, engine.dispatched, slot
        if rank < its:
            best, its = slot, rank
    return int(best)


@_inlined
def _needed(k: Kernel, request: int) -> int:
    """Returns the tokens that an engine has to compute before the request's next one."""
    asked = k.requests[request]
    return int(asked.input_tokens + asked.output_tokens - asked.left)


@_compiled
def _put(k: Kernel, request: int, slot: int, now_s: float) -> None:
    """Puts a request in line at an engine."""
    engine = k.engines[slot]
    k.requests[request].link = NOBODY
    if engine.head == NOBODY:
        engine.head = request
    else:
        k.requests[engine.tail].link = request
    engine.tail = request
    engine.line_tokens += _needed(k, request)
    engine.in_flight += 1
    engine.dispatched += 1
    if engine.mode == IDLE:
        _begin_step(k, slot, now_s)
    elif engine.mode == DECODING and engine.running < min(
        engine.max_num_seqs, engine.max_num_batched_tokens
    ):
        steps = max(1, int(np.ceil((now_s - engine.anchor_s) / engine.step_s)))
        if steps < engine.event_steps:
            engine.event_steps = steps
            _set_event(k, slot, engine.anchor_s + steps * engine.step_s)


@_inlined
def _begin_step(k: Kernel, slot: int, now_s: float) -> None:
    engine = k.engines[slot]
    step = engine.step
    running = _finish_ended(k, slot, step, now_s)
    budget = engine.max_num_batched_tokens - running
    prompt_tokens = 0
    first_taken = engine.head
    num_taken = 0
    while engine.head != NOBODY and running < engine.max_num_seqs and budget > 0:
        request = engine.head
        needed = _needed(k, request) - engine.head_done
        chunk = min(needed, budget)
        prompt_tokens += chunk
        budget -= chunk
        if chunk < needed:
            engine.head_done += chunk
            break
        engine.head_done = 0
        engine.head = k.requests[request].link
        num_taken += 1
        k.ends[slot, running] = ((step + k.requests[request].left) << _SHIFT) | request
        _end_up(k, slot, running)
        running += 1
    engine.running = running
    engine.line_tokens -= prompt_tokens
    engine.computed += prompt_tokens
    engine.anchor_s = now_s
    length_s = (
        engine.base_s + engine.per_sequence_s * running + engine.per_prompt_token_s * prompt_tokens
    )
    engine.step_s = length_s
    if prompt_tokens > 0:
        engine.mode = MIXED
        engine.event_steps = 1
        _note_first_tokens(k, first_taken, num_taken, now_s + length_s)
    elif running > 0:
        engine.mode = DECODING
        engine.event_steps = (k.ends[slot, 0] >> _SHIFT) - step
    else:
        engine.mode = IDLE
        _set_event(k, slot, np.inf)
        return
    _set_event(k, slot, now_s + engine.event_steps * length_s)


@_inlined
def _note_first_tokens(k: Kernel, first_taken: int, num_taken: int, at_s: float) -> None:
    request = first_taken
    for _ in range(num_taken):
        asked = k.requests[request]
        after_s = at_s - asked.arrival_s
        if asked.left == asked.output_tokens:
            asked.first_s = after_s
            if request < k.counts[LINES_FROM]:
                k.counts[FIRST_TOKENS] += 1
                k.counts[LATE] += after_s > asked.allowed_s
        else:
            asked.stall_s += after_s
        request = asked.link


@_inlined
def _finish_ended(k: Kernel, slot: int, step: int, now_s: float) -> int:
    engine = k.engines[slot]
    running = engine.running
    before = running
    num_lines = 0
    while running > 0 and (k.ends[slot, 0] >> _SHIFT) <= step:
        request = k.ends[slot, 0] & _MASK
        running -= 1
        k.ends[slot, 0] = k.ends[slot, running]
        _end_down(k, slot, running)
        asked = k.requests[request]
        asked.left = 0
        asked.last_s = now_s - asked.arrival_s
        asked.status = SERVED
        if request < k.counts[LINES_FROM]:
            k.counts[OUTPUT_TOKENS] += asked.output_tokens
            k.counts[PACED] += asked.output_tokens > 1
            k.counts[SLOW] += asked.last_s - asked.first_s > asked.allowed_more_s
        else:
            num_lines += 1
            k.counts[LINES_INPUT_TOKENS] += asked.input_tokens
            k.counts[LINES_OUTPUT_TOKENS] += asked.output_tokens
            k.batches[k.batch_of[request - k.counts[LINES_FROM]]].on_engines -= 1
    if running < before:
        engine.in_flight -= before - running
        k.counts[ON_ENGINES] -= before - running - num_lines
        k.counts[FINISHED] += before - running - num_lines
        k.counts[LINES_ON_ENGINES] -= num_lines
        k.counts[LINES_FINISHED] += num_lines
    return int(running)


@_compiled
def _park(k: Kernel, request: int, now_s: float) -> None:
    asked = k.requests[request]
    asked.parked_s = now_s - asked.arrival_s
    _append(k, MOVED if asked.moves else IN_TIME, request)
    k.counts[PARKED] += 1


@_compiled
def _append(k: Kernel, row: int, request: int) -> None:
    """Puts a request behind what is in a row."""
    k.requests[request].link = NOBODY
    if k.parked_head[row] == NOBODY:
        k.parked_head[row] = request
    else:
        k.requests[k.parked_tail[row]].link = request
    k.parked_tail[row] = request


@_compiled
def _unpark(k: Kernel, row: int) -> int:
    """Takes the first that waits in a row out, and returns it."""
    request = k.parked_head[row]
    k.parked_head[row] = k.requests[request].link
    return int(request)


@_compiled
def _waits_since_s(k: Kernel, row: int) -> float:
    """Returns since when the first in a row waits; infinite without any."""
    request = k.parked_head[row]
    if request == NOBODY:
        return float(np.inf)
    return float(k.requests[request].arrival_s + k.requests[request].parked_s)


@_compiled
def first_waits_since_s(k: Kernel) -> float:
    """Returns since when the one waits that has waited longest; infinite if none does."""
    since_s = _waits_since_s(k, MOVED)
    for row in range(1, NUM_ROWS):
        since_s = min(since_s, _waits_since_s(k, row))
    return since_s


@_compiled
def _first_expiry_s(k: Kernel, bounds: GatewayBounds) -> float:
    return first_waits_since_s(k) + bounds.request_deadline_s


@_compiled
def _expire_oldest(k: Kernel, now_s: float) -> None:
    row = MOVED
    for other in range(1, NUM_ROWS):
        if _waits_since_s(k, other) < _waits_since_s(k, row):
            row = other
    request = _unpark(k, row)
    k.counts[PARKED] -= 1
    asked = k.requests[request]
    asked.status = FAILED
    if asked.left < asked.output_tokens:
        asked.stall_s += now_s - asked.arrival_s
    _look_full(k, now_s)


@_inlined
def _set_event(k: Kernel, slot: int, at_s: float) -> None:
    engine = k.engines[slot]
    engine.event_s = at_s
    heap, engines = k.event_heap, k.engines
    place = engine.event_at
    while place > 0:
        parent = (place - 1) >> 1
        if engines[heap[parent]].event_s <= at_s:
            break
        heap[place] = heap[parent]
        engines[heap[place]].event_at = place
        place = parent
    size = heap.shape[0]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and engines[heap[child + 1]].event_s < engines[heap[child]].event_s:
            child += 1
        if engines[heap[child]].event_s >= at_s:
            break
        heap[place] = heap[child]
        engines[heap[place]].event_at = place
        place = child
    heap[place] = slot
    engine.event_at = place


@_inlined
def _end_up(k: Kernel, slot: int, place: int) -> None:
    heap = k.ends[slot]
    entry = heap[place]
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent] <= entry:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = entry


@_inlined
def _end_down(k: Kernel, slot: int, size: int) -> None:
    heap = k.ends[slot]
    entry = heap[0]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= entry:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = entry
