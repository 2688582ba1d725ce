"""The simulated engines and the gateway before them, as the rest of the simulator uses them.

Owns the kernel's arrays and the slots of its engines. Does not own when engines come and go
(`slices`), nor what is asked of them (`arrivals`). Every call first lets happen what is due before.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests, SimulatedBatch
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.limits import MAX_WAITING_REQUESTS, REQUEST_DEADLINE_S

_FEWEST_SLOTS = 8


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The limits of a simulated gateway, by default those of a real one.

    A request that waited `request_deadline_s` for an engine fails; one that arrives while
    `max_waiting_requests` wait, and no engine is ready, is refused.
    """

    request_deadline_s: float = REQUEST_DEADLINE_S
    max_waiting_requests: int = MAX_WAITING_REQUESTS

    def __post_init__(self) -> None:
        if self.request_deadline_s <= 0 or self.max_waiting_requests < 0:
            msg = f"request_deadline_s={self.request_deadline_s:g} must be positive, "
            msg += f"max_waiting_requests={self.max_waiting_requests} at least 0"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SimulatedTraffic:
    """The counts since the start, and what is under way, at `at_s`.

    `oldest_wait_s` is of the requests that wait at the gateway without an engine, 0 without one.
    `num_held_back` of those in flight are in line at engines whose sequences are all taken: a real
    gateway holds them back. `are_full` says that all engines are so. `num_late` of the
    `num_first_tokens` came later than the objective of their prompts.
    """

    at_s: float
    num_arrived: int
    input_tokens: int
    num_finished: int
    output_tokens: int
    num_waiting: int
    oldest_wait_s: float
    num_in_flight: int
    num_held_back: int = 0
    are_full: bool = False
    num_first_tokens: int = 0
    num_late: int = 0
    work: "EngineSums | None" = None


@dataclass(frozen=True, slots=True)
class EngineSums:
    """What each engine has done since it opened, by slot: tokens, finished steps, time in them."""

    computed: kernel.I64
    emitted: kernel.I64
    num_steps: kernel.I64
    busy_s: kernel.F64


@dataclass(frozen=True, slots=True)
class LineSums:
    """The lines of batches: those on engines now, those that have ended, and tokens of these."""

    num_on_engines: int
    num_finished: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The end of each request. Seconds count from its arrival; NaN for what never came.

    `status` holds the kernel's SERVED, FAILED, REFUSED. `stall_s` is how long its stream stood
    still because its engine went, `moves` how often that happened, streaming or not.
    """

    first_s: kernel.F32
    last_s: kernel.F32
    stall_s: kernel.F32
    moves: kernel.I16
    status: kernel.I8


class Engines:
    """Models all engines of one simulation. `open` gives out slots and `close` takes them back."""

    def __init__(
        self,
        requests: Requests,
        profile: CapacityProfile,
        limits: GatewayLimits,
        objectives: Objectives | None = None,
        batches: Sequence[SimulatedBatch] = (),
        others: Iterable[CapacityProfile] = (),
    ) -> None:
        """Takes the `profile` of engines, and those of `others` that may be opened besides.

        Nothing is late where there are no `objectives`. Batches are in order of submission.
        """
        others = tuple(others)
        self._ttft_floor_s = profile.ttft_floor_s
        self._profile = profile
        self._lengths = _mean_lengths(requests)
        self._tpot_s = None if objectives is None else objectives.tpot_s
        self._limits = kernel.GatewayBounds(limits.request_deadline_s, limits.max_waiting_requests)
        allowed_s = np.full(len(requests), np.inf, np.float32)
        if objectives is not None:
            prompts_s = objectives.ttft_per_prompt_token_s * requests.input_tokens
            allowed_s[:] = objectives.ttft_s + prompts_s - profile.ttft_floor_s
        self._num_requests = len(requests)
        most_seqs = max(each.max_num_seqs for each in (profile, *others))
        self._state = _empty(requests, allowed_s, most_seqs, batches)
        self._free = list(range(_FEWEST_SLOTS))[::-1]

    def advance(self, until_s: float) -> None:
        """Lets everything happen that is due by then."""
        kernel.advance(self._state, self._limits, until_s)

    def open(self, now_s: float, profile: CapacityProfile | None = None) -> int:
        """Adds an engine that takes requests, and returns its slot; `None`: one like most."""
        self.advance(now_s)
        if not self._free:
            size = len(self._state.event_s)
            self._state = _grown(self._state)
            self._free = list(range(size, 2 * size))[::-1]
        slot = self._free.pop()
        self._set_law(slot, profile or self._profile)
        kernel.open_engine(self._state, slot, now_s)
        return slot

    def _set_law(self, slot: int, profile: CapacityProfile) -> None:
        state = self._state
        state.base_s[slot] = profile.base_s
        state.per_sequence_s[slot] = profile.per_sequence_s
        state.per_prompt_token_s[slot] = profile.per_prompt_token_s
        state.max_num_seqs[slot] = profile.max_num_seqs
        state.max_num_batched_tokens[slot] = profile.max_num_batched_tokens
        state.share[slot] = 1.0
        if self._tpot_s is not None and profile is not self._profile:
            usual, its = (
                each.max_requests_per_s(*self._lengths, self._tpot_s)
                for each in (self._profile, profile)
            )
            state.share[slot] = usual / its if its > 0 else math.inf

    def drain(self, slot: int, now_s: float) -> None:
        """Sends the engine no more requests. What it has stays until `leave` or `close`."""
        self.advance(now_s)
        kernel.stop_routing(self._state, slot)

    def leave(self, slot: int, now_s: float, stay_until_s: float) -> None:
        """Moves requests that will not finish by `stay_until_s`, if another engine exists."""
        self.advance(now_s)
        if self.num_routable:
            kernel.move_off(self._state, slot, now_s, stay_until_s)

    def close(self, slot: int, now_s: float) -> None:
        """Removes the engine: what it still has moves, or waits at the gateway."""
        self.advance(now_s)
        if self._state.route_at[slot] != kernel.NOBODY:
            kernel.stop_routing(self._state, slot)
        kernel.move_off(self._state, slot, now_s, now_s)
        self._free.append(slot)

    def begin_batch(self, batch: int, num_lines: int, now_s: float) -> None:
        """Opens a batch, the one behind the last one, with so many lines at once."""
        assert batch == self._state.counts[kernel.BATCHES_KNOWN]
        self._state.counts[kernel.BATCHES_KNOWN] += 1
        self.set_lines(batch, num_lines, now_s)

    def set_lines(self, batch: int, num_lines: int, now_s: float) -> None:
        """Sets how many lines of an open batch may be on engines at once."""
        self.advance(now_s)
        self._state.batch_limit[batch] = num_lines
        kernel.give_lines(self._state, now_s)

    def end_batch(self, batch: int, now_s: float) -> None:
        """Gives up what has no engine. Lines that have one go on, as long as it does."""
        self.set_lines(batch, 0, now_s)
        state = self._state
        line = state.batch_back[batch]
        while line != kernel.NOBODY:
            state.status[line] = kernel.FAILED
            line = state.link[line]
        state.batch_back[batch] = kernel.NOBODY
        state.status[state.batch_next[batch] : state.batch_end[batch]] = kernel.FAILED
        state.batch_next[batch] = state.batch_end[batch]
        counts = state.counts
        while (first := counts[kernel.BATCHES_OVER]) < counts[kernel.BATCHES_KNOWN]:
            if state.batch_limit[first]:
                break
            counts[kernel.BATCHES_OVER] += 1

    def num_lines_on_engines(self, batch: int) -> int:
        """The number of a batch's lines that have an engine."""
        return int(self._state.batch_on_engines[batch])

    def num_lines_left(self, batch: int) -> int:
        """The number of a batch's lines that have no end yet."""
        state = self._state
        num_back = 0
        line = state.batch_back[batch]
        while line != kernel.NOBODY:
            num_back += 1
            line = state.link[line]
        num_new = int(state.batch_end[batch] - state.batch_next[batch])
        return num_new + num_back + self.num_lines_on_engines(batch)

    def lines(self) -> LineSums:
        """Returns what there is of lines now."""
        counts = self._state.counts
        return LineSums(
            int(counts[kernel.LINES_ON_ENGINES]),
            int(counts[kernel.LINES_FINISHED]),
            int(counts[kernel.LINES_INPUT_TOKENS]),
            int(counts[kernel.LINES_OUTPUT_TOKENS]),
        )

    @property
    def num_routable(self) -> int:
        """The number of engines that take requests."""
        return int(self._state.counts[kernel.ROUTABLE])

    @property
    def in_flight(self) -> list[int]:
        """The number of requests on each engine, by slot."""
        counts: list[int] = self._state.in_flight.tolist()
        return counts

    def traffic(self, now_s: float) -> SimulatedTraffic:
        """Returns what a gateway has counted by now."""
        self.advance(now_s)
        counts = self._state.counts
        oldest_wait_s = 0.0
        if counts[kernel.PARKED]:
            oldest = counts[kernel.PARKED_HEAD]
            parked_at_s = self._state.arrival_s[oldest] + self._state.parked_s[oldest]
            oldest_wait_s = max(0.0, float(now_s - parked_at_s))
        is_routable = self._state.route_at != kernel.NOBODY
        in_line = self._state.in_flight - self._state.running
        is_full = is_routable & (in_line > 0) & (self._state.running >= self._state.max_num_seqs)
        return SimulatedTraffic(
            at_s=now_s,
            num_arrived=int(counts[kernel.ARRIVED]),
            input_tokens=int(counts[kernel.INPUT_TOKENS]),
            num_finished=int(counts[kernel.FINISHED]),
            output_tokens=int(counts[kernel.OUTPUT_TOKENS]),
            num_waiting=int(counts[kernel.PARKED]),
            oldest_wait_s=oldest_wait_s,
            num_in_flight=int(counts[kernel.ON_ENGINES]),
            num_held_back=int(in_line[is_full].sum()),
            are_full=self.num_routable > 0 and int(is_full.sum()) == self.num_routable,
            num_first_tokens=int(counts[kernel.FIRST_TOKENS]),
            num_late=int(counts[kernel.LATE]),
            work=EngineSums(
                self._state.computed.copy(),
                self._state.emitted.copy(),
                self._state.step.copy(),
                self._state.busy_s.copy(),
            ),
        )

    def finish(self) -> Answers:
        """Lets every request end on the engines there are now, and returns how each ended."""
        self.advance(float("inf"))
        self._state.stall_s[self._state.stall_s < 0] = 0
        return self._answers(slice(0, self._num_requests))

    def line_answers(self) -> Answers:
        """Returns how lines ended, in order of their batches, once all is finished.

        Seconds count from the submission of their batch.
        """
        return self._answers(slice(self._num_requests, None))

    def _answers(self, of: slice) -> Answers:
        state, floor_s = self._state, np.float32(self._ttft_floor_s)
        return Answers(
            first_s=state.first_s[of] + floor_s,
            last_s=state.last_s[of] + floor_s,
            stall_s=state.stall_s[of],
            moves=state.moves[of],
            status=state.status[of],
        )


def _mean_lengths(requests: Requests) -> tuple[float, float]:
    if not len(requests):
        return 1.0, 1.0
    return float(requests.input_tokens.mean()), float(requests.output_tokens.mean())


def _empty(
    requests: Requests,
    allowed_s: kernel.F32,
    max_num_seqs: int,
    batches: Sequence[SimulatedBatch],
) -> kernel.Kernel:
    arrival_s, input_tokens, output_tokens = _with_lines(requests, batches)
    num, num_batches = len(arrival_s), len(batches)
    sizes = np.array([len(each.lines) for each in batches], np.int32)
    ends = len(requests) + np.cumsum(sizes, dtype=np.int32)
    counts = np.zeros(kernel.NUM_COUNTS, np.int64)
    counts[kernel.LINES_FROM] = len(requests)
    return kernel.Kernel(
        arrival_s=arrival_s,
        allowed_s=allowed_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        left=output_tokens.copy(),
        link=np.full(num, kernel.NOBODY, np.int32),
        first_s=np.full(num, np.nan, np.float32),
        last_s=np.full(num, np.nan, np.float32),
        stall_s=np.zeros(num, np.float32),
        parked_s=np.zeros(num, np.float32),
        moves=np.zeros(num, np.int16),
        status=np.full(num, kernel.PENDING, np.int8),
        counts=counts,
        batch_of=np.repeat(np.arange(num_batches, dtype=np.int32), sizes),
        batch_next=ends - sizes,
        batch_end=ends,
        batch_back=np.full(num_batches, kernel.NOBODY, np.int32),
        batch_limit=np.zeros(num_batches, np.int32),
        batch_on_engines=np.zeros(num_batches, np.int32),
        **_slots(0, _FEWEST_SLOTS, max_num_seqs),
    )


def _with_lines(
    requests: Requests, batches: Sequence[SimulatedBatch]
) -> tuple[kernel.F64, kernel.I32, kernel.I32]:
    """Returns arrivals, and tokens in and out, of all requests and then of all lines."""
    if not batches:
        return requests.arrival_s, requests.input_tokens, requests.output_tokens
    submitted_s = [np.full(len(each.lines), each.submitted_s) for each in batches]
    given = [each.lines.input_tokens for each in batches]
    taken = [each.lines.output_tokens for each in batches]
    return (
        np.concatenate([requests.arrival_s, *submitted_s]),
        np.concatenate([requests.input_tokens, *given]),
        np.concatenate([requests.output_tokens, *taken]),
    )


# Any: arrays of several types, each as its field of `Kernel` states.
def _slots(first: int, size: int, max_num_seqs: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the values of `Kernel` per slot, for `size` idle ones from `first` on."""
    slots = np.arange(first, first + size, dtype=np.int32)
    return {
        "step": np.zeros(size, np.int64),
        "anchor_s": np.zeros(size),
        "step_s": np.zeros(size),
        "event_s": np.full(size, np.inf),
        "event_steps": np.zeros(size, np.int64),
        "mode": np.full(size, kernel.IDLE, np.int8),
        "running": np.zeros(size, np.int32),
        "head": np.full(size, kernel.NOBODY, np.int32),
        "tail": np.full(size, kernel.NOBODY, np.int32),
        "head_done": np.zeros(size, np.int32),
        "in_flight": np.zeros(size, np.int32),
        "dispatched": np.zeros(size, np.int64),
        "ends": np.zeros((size, max_num_seqs), np.int64),
        "event_heap": slots,
        "event_at": slots.copy(),
        "route_heap": np.zeros(size, np.int32),
        "route_at": np.full(size, kernel.NOBODY, np.int32),
        "emitted": np.zeros(size, np.int64),
        "computed": np.zeros(size, np.int64),
        "busy_s": np.zeros(size),
        "base_s": np.zeros(size),
        "per_sequence_s": np.zeros(size),
        "per_prompt_token_s": np.zeros(size),
        "max_num_seqs": np.zeros(size, np.int32),
        "max_num_batched_tokens": np.zeros(size, np.int32),
        "share": np.ones(size),
    }


def _grown(state: kernel.Kernel) -> kernel.Kernel:
    """Doubles the slots. The new ones have no event: at the end of the heap they keep its order."""
    size, max_num_seqs = state.ends.shape
    fresh = _slots(size, size, max_num_seqs)
    return state._replace(
        **{name: np.concatenate([getattr(state, name), added]) for name, added in fresh.items()}
    )
