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

# More than any cost.
_NEVER = 1 << 62

# Rows of `Kernel.parked_head`: streams that have begun are before all others.
BEGUN, NEW = 0, 1

# Indices of `Kernel.counts`.
ARRIVED, INPUT_TOKENS, FINISHED, OUTPUT_TOKENS = 0, 1, 2, 3
ROUTABLE, PARKED, LEAVING, EXPECTED_TOKENS, ON_ENGINES, MOVES = 4, 5, 6, 7, 8, 9
FIRST_TOKENS, LATE = 10, 11
# The index of the first line, and batches: those that are over come first, then those that are
# open. Of lines: those on engines, those that ended, and tokens of these.
LINES_FROM, BATCHES_OVER, BATCHES_KNOWN = 12, 13, 14
LINES_ON_ENGINES, LINES_FINISHED, LINES_INPUT_TOKENS, LINES_OUTPUT_TOKENS = 15, 16, 17, 18
NUM_COUNTS = 19

# An entry of `Kernel.ends` is the step at which a sequence ends, then the request.
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


def _compiled(function: _Function) -> _Function:
    """Compiles at the first call, and keeps the result beside the source for the next process.

    What is kept is compiled anew when its own file changes, and not when that of what it calls
    does: so all of it is in this file, and constants of others come in as arguments.
    """
    return cast(_Function, njit(cache=True)(function))


class GatewayBounds(NamedTuple):
    """The gateway's limits, times in seconds, and the constants of its choice (`choice_costs`)."""

    request_deadline_s: float
    max_waiting_requests: int
    step_tokens: int
    sequence_tokens: int
    most_in_step: int
    for_others: int
    same_tokens: int
    drawn_from: int
    as_good_tokens: int


class Kernel(NamedTuple):
    """The whole state, changed in place.

    Per request: `first_s` and `last_s` are its first and last token after its arrival (NaN without
    one), `allowed_s` is the longest `first_s` of its objective, `left` the tokens still to give,
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
    `batch_next` to `batch_end` have not begun, those that came back are linked from `batch_back`,
    and of `batch_on_engines` there may be `batch_limit`. What waits at the gateway is linked from
    `parked_head` to `parked_tail`, in rows of its own for what has begun.
    """

    arrival_s: F64
    allowed_s: F32
    input_tokens: I32
    output_tokens: I32
    left: I32
    link: I32
    first_s: F32
    last_s: F32
    stall_s: F32
    parked_s: F32
    moves: I16
    status: I8
    step: I64
    anchor_s: F64
    step_s: F64
    event_s: F64
    event_steps: I64
    mode: I8
    running: I32
    head: I32
    tail: I32
    head_done: I32
    in_flight: I32
    dispatched: I64
    line_tokens: I64
    leave_by_s: F64
    ends: I64
    event_heap: I32
    event_at: I32
    routable: I32
    route_at: I32
    parked_head: I32
    parked_tail: I32
    counts: I64
    emitted: I64
    computed: I64
    busy_s: F64
    base_s: F64
    per_sequence_s: F64
    per_prompt_token_s: F64
    max_num_seqs: I32
    max_num_batched_tokens: I32
    batch_of: I32
    batch_next: I32
    batch_end: I32
    batch_back: I32
    batch_limit: I32
    batch_on_engines: I32


@_compiled
def advance(k: Kernel, bounds: GatewayBounds, until_s: float) -> None:
    """Lets everything happen that is due by `until_s`; of equal instants engines come first."""
    counts = k.counts
    num_requests = counts[LINES_FROM]
    while True:
        slot = k.event_heap[0]
        engine_s = k.event_s[slot]
        arrived = counts[ARRIVED]
        arrival_s = k.arrival_s[arrived] if arrived < num_requests else np.inf
        expiry_s = _first_expiry_s(k, bounds) if counts[PARKED] else np.inf
        if min(engine_s, arrival_s, expiry_s) > until_s:
            return
        if engine_s <= arrival_s and engine_s <= expiry_s:
            if engine_s == np.inf:
                return
            k.step[slot] += k.event_steps[slot]
            k.emitted[slot] += k.event_steps[slot] * k.running[slot]
            k.busy_s[slot] += k.event_steps[slot] * k.step_s[slot]
            _begin_step(k, slot, engine_s)
            if k.route_at[slot] == NOBODY or has_place(k, slot):
                _use_room(k, bounds, engine_s)
            give_lines(k, engine_s)
        elif expiry_s <= arrival_s:
            _expire_oldest(k, expiry_s)
        else:
            counts[ARRIVED] += 1
            counts[INPUT_TOKENS] += k.input_tokens[arrived]
            if counts[ROUTABLE] == 0 and counts[PARKED] >= bounds.max_waiting_requests:
                k.status[arrived] = REFUSED
            else:
                _enter(k, bounds, arrived, arrival_s)
                # Another engine may have the fewest now.
                give_lines(k, arrival_s)


@_compiled
def open_engine(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float) -> None:
    """Opens an empty engine. It takes requests from now on, at first those that wait."""
    k.step[slot] = 0
    k.emitted[slot] = 0
    k.computed[slot] = 0
    k.busy_s[slot] = 0.0
    k.running[slot] = 0
    k.head[slot] = NOBODY
    k.head_done[slot] = 0
    k.line_tokens[slot] = 0
    k.in_flight[slot] = 0
    k.dispatched[slot] = 0
    k.leave_by_s[slot] = np.inf
    k.mode[slot] = IDLE
    place = k.counts[ROUTABLE]
    k.counts[ROUTABLE] += 1
    k.routable[place] = slot
    k.route_at[slot] = place
    _use_room(k, bounds, now_s)
    give_lines(k, now_s)


@_compiled
def give_lines(k: Kernel, now_s: float) -> None:
    """Gives lines to engines that have room, the batches that are due first first."""
    if k.counts[PARKED]:
        return
    for batch in range(k.counts[BATCHES_OVER], k.counts[BATCHES_KNOWN]):
        while k.batch_on_engines[batch] < k.batch_limit[batch]:
            slot = _fewest_in_flight(k)
            if slot == NOBODY:
                return
            if k.head[slot] != NOBODY or k.in_flight[slot] >= k.max_num_seqs[slot]:
                return
            line = k.batch_back[batch]
            if line != NOBODY:
                k.batch_back[batch] = k.link[line]
            elif k.batch_next[batch] < k.batch_end[batch]:
                line = k.batch_next[batch]
                k.batch_next[batch] += 1
            else:
                break
            k.batch_on_engines[batch] += 1
            k.counts[LINES_ON_ENGINES] += 1
            _put(k, line, slot, now_s)


@_compiled
def stop_routing(k: Kernel, slot: int) -> None:
    """Sends the engine no more requests; what it has goes on."""
    place = k.route_at[slot]
    k.counts[ROUTABLE] -= 1
    moved = k.routable[k.counts[ROUTABLE]]
    k.routable[place] = moved
    k.route_at[moved] = place
    k.route_at[slot] = NOBODY


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
        k.leave_by_s[slot] = until_s
        k.counts[LEAVING] += 1


@_compiled
def _stop_leaving(k: Kernel, slot: int) -> None:
    if k.leave_by_s[slot] < np.inf:
        k.leave_by_s[slot] = np.inf
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
    for slot in range(k.leave_by_s.shape[0]):
        until_s = k.leave_by_s[slot]
        if until_s < np.inf and not _move_off(k, bounds, slot, now_s, until_s):
            _stop_leaving(k, slot)


@_compiled
def _move_off(k: Kernel, bounds: GatewayBounds, slot: int, now_s: float, until_s: float) -> bool:
    """Moves what will not have finished by then off an engine, as far as others have room for it.

    Once it is `until_s` all of it goes, in order of arrival. Tokens given so far are computed again
    with the prompt; a step in progress is lost to those that go. Returns whether some are left that
    are to go.
    """
    if k.in_flight[slot] == 0:
        return False
    whole_steps = 0
    if k.mode[slot] == DECODING:
        whole_steps = int((now_s - k.anchor_s[slot]) / k.step_s[slot])
        whole_steps = min(whole_steps, k.event_steps[slot] - 1)
    done = k.step[slot] + whole_steps
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
    for place in range(k.running[slot]):
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
    k.in_flight[slot] -= num_moved + len(leaving) - first_line
    k.running[slot] = kept
    _go_on(k, slot, now_s, whole_steps)
    k.counts[ON_ENGINES] -= num_moved
    k.counts[MOVES] += num_moved
    for place in range(len(leaving) - 1, first_line - 1, -1):
        line = leaving[place]
        batch = k.batch_of[line - k.counts[LINES_FROM]]
        k.moves[line] += 1
        k.link[line] = k.batch_back[batch]
        k.batch_back[batch] = line
        k.batch_on_engines[batch] -= 1
        k.counts[LINES_ON_ENGINES] -= 1
    for request in leaving[:num_moved]:
        k.moves[request] += 1
        _enter(k, bounds, request, now_s)
    give_lines(k, now_s)
    return bool(num_moved < first_line)


@_compiled
def _pace_s(k: Kernel, slot: int) -> float:
    return float(k.base_s[slot] + k.per_sequence_s[slot] * k.running[slot])


@_compiled
def _unfinished(k: Kernel, slot: int, done: int, now_s: float, until_s: float) -> I32:
    """Returns what an engine has that will not have finished by then, in order of arrival."""
    found = np.empty(k.in_flight[slot], np.int32)
    count = 0
    request = k.head[slot]
    while request != NOBODY:
        found[count] = request
        count += 1
        request = k.link[request]
    pace_s = _pace_s(k, slot)
    for place in range(k.running[slot]):
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
        slot = k.routable[at]
        places[at] = k.max_num_seqs[slot] - k.in_flight[slot]
        tokens[at] = k.max_num_batched_tokens[slot] - k.line_tokens[slot]
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
    request, last = k.head[slot], NOBODY
    is_first = True
    while request != NOBODY:
        following = k.link[request]
        if first_kept <= request < k.counts[LINES_FROM]:
            if last == NOBODY:
                k.head[slot] = request
            else:
                k.link[last] = request
            last = request
        else:
            k.line_tokens[slot] -= _needed(k, request)
            if is_first:
                k.line_tokens[slot] += k.head_done[slot]
                k.head_done[slot] = 0
        is_first = False
        request = following
    if last == NOBODY:
        k.head[slot] = NOBODY
    else:
        k.link[last] = NOBODY
        k.tail[slot] = last


@_compiled
def _go_on(k: Kernel, slot: int, now_s: float, whole_steps: int) -> None:
    """Has an engine go on with what is left on it, in the step under way."""
    if k.mode[slot] == DECODING and k.running[slot]:
        k.event_steps[slot] = whole_steps + 1
        _set_event(k, slot, k.anchor_s[slot] + (whole_steps + 1) * k.step_s[slot])
    elif k.in_flight[slot] == 0:
        k.mode[slot] = IDLE
        _set_event(k, slot, np.inf)
    elif k.mode[slot] == DECODING:
        _begin_step(k, slot, now_s)


@_compiled
def _interrupt(k: Kernel, slot: int, request: int, to_give: int, now_s: float) -> None:
    is_in_first_step = k.mode[slot] == MIXED and to_give == k.left[request]
    # What was noted ahead for the end of the step that is now lost is taken back.
    stopped_s = k.event_s[slot] if is_in_first_step else now_s
    k.left[request] = to_give
    if to_give == k.output_tokens[request]:
        k.first_s[request] = np.nan
    else:
        k.stall_s[request] -= stopped_s - k.arrival_s[request]


@_compiled
def _enter(k: Kernel, bounds: GatewayBounds, request: int, now_s: float) -> None:
    """Gives a request to an engine, or lets it wait behind its like."""
    if not k.counts[PARKED]:
        slot = choose(k, bounds, request, number_of(request))
        if slot >= 0:
            k.counts[ON_ENGINES] += 1
            _put(k, request, slot, now_s)
            return
    _park(k, request, now_s)
    _serve(k, bounds, now_s)


@_compiled
def _serve(k: Kernel, bounds: GatewayBounds, now_s: float) -> None:
    """Gives those that wait to engines, the first ones first, as far as there is room."""
    for row in range(2):
        while k.parked_head[row] != NOBODY:
            request = k.parked_head[row]
            slot = choose(k, bounds, request, number_of(request))
            if slot == NOBODY:
                return
            _unpark(k, row)
            k.counts[ON_ENGINES] += 1
            _put(k, request, slot, now_s)


@_compiled
def number_of(request: int) -> int:
    """Returns a number that is another one for each request, from 0 to below 2^32."""
    mixed = np.uint64(request + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(mixed >> np.uint64(32))


@_compiled
def has_place(k: Kernel, slot: int) -> bool:
    """Returns whether an engine takes another request, by its sequences and its line."""
    has_line = k.line_tokens[slot] >= k.max_num_batched_tokens[slot]
    return bool(k.in_flight[slot] < k.max_num_seqs[slot] and not has_line)


@_compiled
def choose(k: Kernel, bounds: GatewayBounds, request: int, number: int) -> int:
    """Returns an engine on which a request takes least, of those that have a place for it.

    `NOBODY` if none has a place. Of many engines it is any that is as good, another one for each
    `number`.
    """
    tokens = _needed(k, request)
    given = k.output_tokens[request] - k.left[request]
    expected = max(0, k.counts[EXPECTED_TOKENS] - given)
    costs = np.empty(k.counts[ROUTABLE], np.int64)
    least, num = _NEVER, 0
    for at in range(len(costs)):
        slot = k.routable[at]
        costs[at] = _NEVER
        if has_place(k, slot):
            num += 1
            costs[at] = _cost(k, bounds, slot, tokens, expected)
            least = min(least, costs[at])
    if num == 0:
        return NOBODY
    if num <= bounds.drawn_from:
        return _least_of(k, bounds, costs)
    return _drawn_from(k, costs, least + bounds.as_good_tokens, number)


@_compiled
def _least_of(k: Kernel, bounds: GatewayBounds, costs: I64) -> int:
    """Returns the one that costs least; among equals, that has fewest, or was least used."""
    best, its = NOBODY, (_NEVER, 0, 0, 0)
    for at in range(len(costs)):
        if costs[at] < _NEVER:
            slot = k.routable[at]
            rank = costs[at] // bounds.same_tokens, k.in_flight[slot], k.dispatched[slot], slot
            if rank < its:
                best, its = slot, rank
    return int(best)


@_compiled
def _drawn_from(k: Kernel, costs: I64, below: int, number: int) -> int:
    """Returns one of those that cost less than `below`."""
    to_pass = number % np.count_nonzero(costs < below)
    for at in range(len(costs)):
        if costs[at] < below:
            if to_pass == 0:
                return int(k.routable[at])
            to_pass -= 1
    return NOBODY


@_compiled
def _cost(k: Kernel, bounds: GatewayBounds, slot: int, tokens: int, expected: int) -> int:
    """Returns what `choice_costs.whole_cost` does of a request on an engine."""
    count = k.in_flight[slot]
    line = k.line_tokens[slot] + tokens
    num_steps = -(-line // bounds.most_in_step)
    to_first = line + num_steps * (bounds.step_tokens + bounds.sequence_tokens * count)
    return int(to_first + bounds.for_others * tokens + expected * bounds.sequence_tokens * count)


@_compiled
def _fewest_in_flight(k: Kernel) -> int:
    """Returns the engine with the fewest requests, of those that take some, or nobody."""
    best = NOBODY
    for at in range(k.counts[ROUTABLE]):
        slot = k.routable[at]
        if best == NOBODY or (k.in_flight[slot], k.dispatched[slot], slot) < (
            k.in_flight[best],
            k.dispatched[best],
            best,
        ):
            best = slot
    return int(best)


@_compiled
def _needed(k: Kernel, request: int) -> int:
    """Returns the tokens that an engine has to compute before the request's next one."""
    return int(k.input_tokens[request] + k.output_tokens[request] - k.left[request])


@_compiled
def _put(k: Kernel, request: int, slot: int, now_s: float) -> None:
    """Puts a request in line at an engine."""
    k.link[request] = NOBODY
    if k.head[slot] == NOBODY:
        k.head[slot] = request
    else:
        k.link[k.tail[slot]] = request
    k.tail[slot] = request
    k.line_tokens[slot] += _needed(k, request)
    k.in_flight[slot] += 1
    k.dispatched[slot] += 1
    if k.mode[slot] == IDLE:
        _begin_step(k, slot, now_s)
    elif k.mode[slot] == DECODING and k.running[slot] < min(
        k.max_num_seqs[slot], k.max_num_batched_tokens[slot]
    ):
        steps = max(1, int(np.ceil((now_s - k.anchor_s[slot]) / k.step_s[slot])))
        if steps < k.event_steps[slot]:
            k.event_steps[slot] = steps
            _set_event(k, slot, k.anchor_s[slot] + steps * k.step_s[slot])


@_compiled
def _begin_step(k: Kernel, slot: int, now_s: float) -> None:
    step = k.step[slot]
    running = _finish_ended(k, slot, step, now_s)
    budget = k.max_num_batched_tokens[slot] - running
    prompt_tokens = 0
    first_taken = k.head[slot]
    num_taken = 0
    while k.head[slot] != NOBODY and running < k.max_num_seqs[slot] and budget > 0:
        request = k.head[slot]
        needed = _needed(k, request) - k.head_done[slot]
        chunk = min(needed, budget)
        prompt_tokens += chunk
        budget -= chunk
        if chunk < needed:
            k.head_done[slot] += chunk
            break
        k.head_done[slot] = 0
        k.head[slot] = k.link[request]
        num_taken += 1
        k.ends[slot, running] = ((step + k.left[request]) << _SHIFT) | request
        _end_up(k, slot, running)
        running += 1
    k.running[slot] = running
    k.line_tokens[slot] -= prompt_tokens
    k.computed[slot] += prompt_tokens
    k.anchor_s[slot] = now_s
    length_s = (
        k.base_s[slot]
        + k.per_sequence_s[slot] * running
        + k.per_prompt_token_s[slot] * prompt_tokens
    )
    k.step_s[slot] = length_s
    if prompt_tokens > 0:
        k.mode[slot] = MIXED
        k.event_steps[slot] = 1
        _note_first_tokens(k, first_taken, num_taken, now_s + length_s)
    elif running > 0:
        k.mode[slot] = DECODING
        k.event_steps[slot] = (k.ends[slot, 0] >> _SHIFT) - step
    else:
        k.mode[slot] = IDLE
        _set_event(k, slot, np.inf)
        return
    _set_event(k, slot, now_s + k.event_steps[slot] * length_s)


@_compiled
def _note_first_tokens(k: Kernel, first_taken: int, num_taken: int, at_s: float) -> None:
    request = first_taken
    for _ in range(num_taken):
        after_s = at_s - k.arrival_s[request]
        if k.left[request] == k.output_tokens[request]:
            k.first_s[request] = after_s
            if request < k.counts[LINES_FROM]:
                k.counts[FIRST_TOKENS] += 1
                k.counts[LATE] += after_s > k.allowed_s[request]
        else:
            k.stall_s[request] += after_s
        request = k.link[request]


@_compiled
def _finish_ended(k: Kernel, slot: int, step: int, now_s: float) -> int:
    running = k.running[slot]
    before = running
    num_lines = 0
    while running > 0 and (k.ends[slot, 0] >> _SHIFT) <= step:
        request = k.ends[slot, 0] & _MASK
        running -= 1
        k.ends[slot, 0] = k.ends[slot, running]
        _end_down(k, slot, running)
        k.left[request] = 0
        k.last_s[request] = now_s - k.arrival_s[request]
        k.status[request] = SERVED
        if request < k.counts[LINES_FROM]:
            k.counts[OUTPUT_TOKENS] += k.output_tokens[request]
        else:
            num_lines += 1
            k.counts[LINES_INPUT_TOKENS] += k.input_tokens[request]
            k.counts[LINES_OUTPUT_TOKENS] += k.output_tokens[request]
            k.batch_on_engines[k.batch_of[request - k.counts[LINES_FROM]]] -= 1
    if running < before:
        k.in_flight[slot] -= before - running
        k.counts[ON_ENGINES] -= before - running - num_lines
        k.counts[FINISHED] += before - running - num_lines
        k.counts[LINES_ON_ENGINES] -= num_lines
        k.counts[LINES_FINISHED] += num_lines
    return int(running)


@_compiled
def _park(k: Kernel, request: int, now_s: float) -> None:
    row = BEGUN if k.left[request] < k.output_tokens[request] else NEW
    k.parked_s[request] = now_s - k.arrival_s[request]
    k.link[request] = NOBODY
    if k.parked_head[row] == NOBODY:
        k.parked_head[row] = request
    else:
        k.link[k.parked_tail[row]] = request
    k.parked_tail[row] = request
    k.counts[PARKED] += 1


@_compiled
def _unpark(k: Kernel, row: int) -> int:
    """Takes the first that waits in a row out, and returns it."""
    request = k.parked_head[row]
    k.parked_head[row] = k.link[request]
    k.counts[PARKED] -= 1
    return int(request)


@_compiled
def _waits_since_s(k: Kernel, row: int) -> float:
    """Returns since when the first in a row waits; infinite without any."""
    request = k.parked_head[row]
    if request == NOBODY:
        return float(np.inf)
    return float(k.arrival_s[request] + k.parked_s[request])


@_compiled
def first_waits_since_s(k: Kernel) -> float:
    """Returns since when the one waits that has waited longest; infinite if none does."""
    return min(_waits_since_s(k, BEGUN), _waits_since_s(k, NEW))


@_compiled
def _first_expiry_s(k: Kernel, bounds: GatewayBounds) -> float:
    return first_waits_since_s(k) + bounds.request_deadline_s


@_compiled
def _expire_oldest(k: Kernel, now_s: float) -> None:
    row = BEGUN if _waits_since_s(k, BEGUN) <= _waits_since_s(k, NEW) else NEW
    request = _unpark(k, row)
    k.status[request] = FAILED
    if k.left[request] < k.output_tokens[request]:
        k.stall_s[request] += now_s - k.arrival_s[request]


@_compiled
def _set_event(k: Kernel, slot: int, at_s: float) -> None:
    k.event_s[slot] = at_s
    heap, event_s, places = k.event_heap, k.event_s, k.event_at
    place = places[slot]
    while place > 0:
        parent = (place - 1) >> 1
        if event_s[heap[parent]] <= at_s:
            break
        heap[place] = heap[parent]
        places[heap[place]] = place
        place = parent
    size = heap.shape[0]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and event_s[heap[child + 1]] < event_s[heap[child]]:
            child += 1
        if event_s[heap[child]] >= at_s:
            break
        heap[place] = heap[child]
        places[heap[place]] = place
        place = child
    heap[place] = slot
    places[slot] = place


@_compiled
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


@_compiled
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
