"""The hot loop: requests, the gateway's routing and the engines' steps, compiled.

Owns what happens between two changes of the fleet: arrivals, waiting at the gateway, routing to the
engine with the fewest requests in flight, continuous batching, and the move of requests off an
engine. Does not own when engines come and go (`slices`). Pure: no clock, no I/O, no chance.

Every step of the law of `serving.domain.capacity` is honoured, but not every step is an event.
While an engine only decodes, its steps are equally long, so the kernel leaps to the step after
which a sequence ends or at which an arrival is taken in. Steps that compute prompts are events of
their own. Nothing is averaged: a simulation step by step gives the same instants up to rounding.

A step takes in, as vLLM's scheduler does, one token for each running sequence and then prompts in
order of arrival, up to `max_num_batched_tokens` in all and `max_num_seqs` sequences. The step that
computes the last of a prompt gives its first token. Not modelled: the size of the KV cache, and
prefix caching (give input tokens without what the cache saves).

A request is bound to an engine when it comes. A gateway chooses so where it knows neither lines nor
room nor caches; where engines tell of them it goes by these, and lets requests wait at itself
(`serving.gateway.dispatch`). That is not modelled either.

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

# Indices of `Kernel.counts`.
ARRIVED, INPUT_TOKENS, FINISHED, OUTPUT_TOKENS = 0, 1, 2, 3
ROUTABLE, PARKED, PARKED_HEAD, PARKED_TAIL, ON_ENGINES, MOVES = 4, 5, 6, 7, 8, 9
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
    """Compiles at the first call, and keeps the result beside the source for the next process."""
    return cast(_Function, njit(cache=True)(function))


class GatewayBounds(NamedTuple):
    """The gateway's limits. Times in seconds."""

    request_deadline_s: float
    max_waiting_requests: int


class Kernel(NamedTuple):
    """The whole state, changed in place.

    Per request: `first_s` and `last_s` are its first and last token after its arrival (NaN without
    one), `allowed_s` is the longest `first_s` of its objective, `left` the tokens still to give,
    `stall_s` how long its stream stood still because it had to move, `parked_s` when it began to
    wait at the gateway, after its arrival. Per engine: `step`
    counts its finished steps as of `anchor_s`; at `event_s` another `event_steps` of `step_s` each
    are done. `ends` is a heap per engine over its `running` sequences; the queue from `head` to
    `tail` has no prompt computed but `head_done` tokens of the first. `event_heap` holds every slot
    by `event_s`; `route_heap` the first `counts[ROUTABLE]` slots by requests in flight, and
    `route_at` is the place in it or `NOBODY`. `emitted` output tokens and `computed` prompt tokens
    are sums since it opened, and so is `busy_s`, the time in its finished steps. `base_s` and the
    four after it are its law; a request is `share` of what it carries, beside that of others. Per
    line: `batch_of`. Per batch: the lines from `batch_next` to `batch_end` have not begun, those
    that came back are linked from `batch_back`, and of `batch_on_engines` there may be
    `batch_limit`.
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
    ends: I64
    event_heap: I32
    event_at: I32
    route_heap: I32
    route_at: I32
    counts: I64
    emitted: I64
    computed: I64
    busy_s: F64
    base_s: F64
    per_sequence_s: F64
    per_prompt_token_s: F64
    max_num_seqs: I32
    max_num_batched_tokens: I32
    share: F64
    batch_of: I32
    batch_next: I32
    batch_end: I32
    batch_back: I32
    batch_limit: I32
    batch_on_engines: I32


@_compiled
def advance(k: Kernel, limits: GatewayBounds, until_s: float) -> None:
    """Lets everything happen that is due by `until_s`; of equal instants engines come first."""
    counts = k.counts
    num_requests = counts[LINES_FROM]
    while True:
        slot = k.event_heap[0]
        engine_s = k.event_s[slot]
        arrived = counts[ARRIVED]
        arrival_s = k.arrival_s[arrived] if arrived < num_requests else np.inf
        expiry_s = np.inf
        if counts[PARKED]:
            oldest = counts[PARKED_HEAD]
            expiry_s = k.arrival_s[oldest] + k.parked_s[oldest] + limits.request_deadline_s
        if min(engine_s, arrival_s, expiry_s) > until_s:
            return
        if engine_s <= arrival_s and engine_s <= expiry_s:
            if engine_s == np.inf:
                return
            k.step[slot] += k.event_steps[slot]
            k.emitted[slot] += k.event_steps[slot] * k.running[slot]
            k.busy_s[slot] += k.event_steps[slot] * k.step_s[slot]
            _begin_step(k, slot, engine_s)
            give_lines(k, engine_s)
        elif expiry_s <= arrival_s:
            _expire_oldest(k, expiry_s)
        else:
            counts[ARRIVED] += 1
            counts[INPUT_TOKENS] += k.input_tokens[arrived]
            if counts[ROUTABLE] == 0 and counts[PARKED] >= limits.max_waiting_requests:
                k.status[arrived] = REFUSED
            else:
                _dispatch(k, arrived, arrival_s)
                # Another engine may have the fewest now.
                give_lines(k, arrival_s)


@_compiled
def open_engine(k: Kernel, slot: int, now_s: float) -> None:
    """Opens an empty engine. It takes requests from now on, at first those that wait."""
    k.step[slot] = 0
    k.emitted[slot] = 0
    k.computed[slot] = 0
    k.busy_s[slot] = 0.0
    k.running[slot] = 0
    k.head[slot] = NOBODY
    k.head_done[slot] = 0
    k.in_flight[slot] = 0
    k.dispatched[slot] = 0
    k.mode[slot] = IDLE
    place = k.counts[ROUTABLE]
    k.counts[ROUTABLE] += 1
    k.route_heap[place] = slot
    k.route_at[slot] = place
    _route_up(k, place)
    while k.counts[PARKED]:
        _dispatch(k, _unpark(k), now_s)
    give_lines(k, now_s)


@_compiled
def give_lines(k: Kernel, now_s: float) -> None:
    """Gives lines to engines that have room, the batches that are due first first."""
    for batch in range(k.counts[BATCHES_OVER], k.counts[BATCHES_KNOWN]):
        while k.batch_on_engines[batch] < k.batch_limit[batch]:
            if k.counts[ROUTABLE] == 0:
                return
            slot = k.route_heap[0]
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
    last = k.counts[ROUTABLE]
    k.route_at[slot] = NOBODY
    if place != last:
        moved = k.route_heap[last]
        k.route_heap[place] = moved
        k.route_at[moved] = place
        _route_up(k, place)
        _route_down(k, k.route_at[moved])


@_compiled
def move_off(k: Kernel, slot: int, now_s: float, until_s: float) -> int:
    """Moves what will not have finished by `until_s` off an engine that gets no more requests.

    They go elsewhere in order of arrival, or wait at the gateway. Tokens given so far are computed
    again with the prompt; a step in progress is lost. Returns how many moved.
    """
    num_leaving = k.in_flight[slot]
    if num_leaving == 0:
        return 0
    leaving = np.empty(num_leaving, np.int32)
    count = 0
    request = k.head[slot]
    while request != NOBODY:
        leaving[count] = request
        count += 1
        request = k.link[request]
    k.head[slot] = NOBODY
    k.head_done[slot] = 0
    done = k.step[slot]
    pace_s = k.base_s[slot] + k.per_sequence_s[slot] * k.running[slot]
    whole_steps = 0
    if k.mode[slot] == DECODING:
        whole_steps = int((now_s - k.anchor_s[slot]) / k.step_s[slot])
        whole_steps = min(whole_steps, k.event_steps[slot] - 1)
    done += whole_steps
    kept = 0
    for place in range(k.running[slot]):
        entry = k.ends[slot, place]
        to_give = (entry >> _SHIFT) - done
        if now_s + to_give * pace_s <= until_s:
            k.ends[slot, kept] = entry
            kept += 1
            _end_up(k, slot, kept - 1)
        else:
            request = entry & _MASK
            _interrupt(k, slot, request, to_give, now_s)
            leaving[count] = request
            count += 1
    k.running[slot] = kept
    k.in_flight[slot] = kept
    if kept == 0:
        k.mode[slot] = IDLE
        _set_event(k, slot, np.inf)
    elif k.mode[slot] == DECODING:
        k.event_steps[slot] = whole_steps + 1
        _set_event(k, slot, k.anchor_s[slot] + (whole_steps + 1) * k.step_s[slot])
    # Lines are put back last first, so that the first one goes first again.
    ordered = np.sort(leaving[:count])
    first_line = np.searchsorted(ordered, k.counts[LINES_FROM])
    k.counts[ON_ENGINES] -= first_line
    k.counts[MOVES] += first_line
    for place in range(count - 1, first_line - 1, -1):
        line = ordered[place]
        batch = k.batch_of[line - k.counts[LINES_FROM]]
        k.moves[line] += 1
        k.link[line] = k.batch_back[batch]
        k.batch_back[batch] = line
        k.batch_on_engines[batch] -= 1
        k.counts[LINES_ON_ENGINES] -= 1
    for request in ordered[:first_line]:
        k.moves[request] += 1
        _dispatch(k, request, now_s)
    give_lines(k, now_s)
    return count


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
def _dispatch(k: Kernel, request: int, now_s: float) -> None:
    if k.counts[ROUTABLE] == 0:
        _park(k, request, now_s)
        return
    k.counts[ON_ENGINES] += 1
    _put(k, request, k.route_heap[0], now_s)


@_compiled
def _put(k: Kernel, request: int, slot: int, now_s: float) -> None:
    """Puts a request in line at an engine, the first one of `route_heap`."""
    k.link[request] = NOBODY
    if k.head[slot] == NOBODY:
        k.head[slot] = request
    else:
        k.link[k.tail[slot]] = request
    k.tail[slot] = request
    k.in_flight[slot] += 1
    k.dispatched[slot] += 1
    _route_down(k, 0)
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
        given = k.output_tokens[request] - k.left[request]
        needed = k.input_tokens[request] + given - k.head_done[slot]
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
        if k.route_at[slot] != NOBODY:
            _route_up(k, k.route_at[slot])
    return int(running)


@_compiled
def _park(k: Kernel, request: int, now_s: float) -> None:
    k.parked_s[request] = now_s - k.arrival_s[request]
    k.link[request] = NOBODY
    if k.counts[PARKED] == 0:
        k.counts[PARKED_HEAD] = request
    else:
        k.link[k.counts[PARKED_TAIL]] = request
    k.counts[PARKED_TAIL] = request
    k.counts[PARKED] += 1


@_compiled
def _unpark(k: Kernel) -> int:
    request = k.counts[PARKED_HEAD]
    k.counts[PARKED_HEAD] = k.link[request]
    k.counts[PARKED] -= 1
    return int(request)


@_compiled
def _expire_oldest(k: Kernel, now_s: float) -> None:
    request = _unpark(k)
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
def _is_preferred(k: Kernel, slot: int, other: int) -> bool:
    """Fewest in flight for what it carries, then least used, then by name.

    It is the gateway's order among engines of which it knows nothing else.
    """
    mine, its = k.in_flight[slot] * k.share[slot], k.in_flight[other] * k.share[other]
    if mine != its:
        return bool(mine < its)
    if k.dispatched[slot] != k.dispatched[other]:
        return bool(k.dispatched[slot] < k.dispatched[other])
    return slot < other


@_compiled
def _route_up(k: Kernel, place: int) -> None:
    heap = k.route_heap
    slot = heap[place]
    while place > 0:
        parent = (place - 1) >> 1
        if not _is_preferred(k, slot, heap[parent]):
            break
        heap[place] = heap[parent]
        k.route_at[heap[place]] = place
        place = parent
    heap[place] = slot
    k.route_at[slot] = place


@_compiled
def _route_down(k: Kernel, place: int) -> None:
    heap = k.route_heap
    slot = heap[place]
    size = k.counts[ROUTABLE]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _is_preferred(k, heap[child + 1], heap[child]):
            child += 1
        if not _is_preferred(k, heap[child], slot):
            break
        heap[place] = heap[child]
        k.route_at[heap[place]] = place
        place = child
    heap[place] = slot
    k.route_at[slot] = place


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
