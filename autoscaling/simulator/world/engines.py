"""The simulated engines and the gateway before them, as the rest of the simulator uses them.

Owns the kernel's arrays and the slots of its engines. Does not own when engines come and go
(`slices`), nor what is asked of them (`arrivals`). Every call first lets happen what is due before.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests, SimulatedBatch
from serving.domain.capacity import choice_costs, overdue, step_places
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.limits import MAX_WAITING_REQUESTS, REQUEST_DEADLINE_S
from serving.domain.usage.tenant_shares import OUTPUT_WEIGHT

_FEWEST_SLOTS = 8
# A gateway expects answers to be as long as those of so many seconds were, on average.
_LENGTH_WINDOW_S = 30.0
_LAW = (
    *("base_s", "per_sequence_s", "per_prompt_token_s"),
    *("max_num_seqs", "max_num_batched_tokens"),
)


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The limits of a simulated gateway, by default those of a real one.

    A request that waited `request_deadline_s` for a place on an engine fails; one that arrives
    while `max_waiting_requests` wait, and no engine is ready, is refused.
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

    `oldest_wait_s` is of the requests that wait at the gateway, 0 without one. For `full_s` in all
    some waited, and no engine had a place. `num_late` of the `num_first_tokens` came later than the
    objective of their prompts, and `num_slow` of the `num_paced` answers, those with two tokens or
    more, were slower than theirs.
    """

    at_s: float
    num_arrived: int
    input_tokens: int
    num_finished: int
    output_tokens: int
    num_waiting: int
    oldest_wait_s: float
    num_in_flight: int
    full_s: float = 0.0
    num_first_tokens: int = 0
    num_late: int = 0
    num_paced: int = 0
    num_slow: int = 0
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
        self._bounds = bounds_of(limits, objectives)
        self._ended: deque[tuple[float, int, int]] = deque()  # at, requests, output tokens
        allowed_s = np.full((2, len(requests)), np.inf, np.float32)
        if objectives is not None:
            prompts_s = objectives.ttft_per_prompt_token_s * requests.input_tokens
            allowed_s[0] = objectives.ttft_s + prompts_s - profile.ttft_floor_s
            allowed_s[1] = objectives.tpot_s * (requests.output_tokens - 1)
        self._num_requests = len(requests)
        most_seqs = max(each.max_num_seqs for each in (profile, *others))
        # Tests look at it, and set it, as no run would come to it.
        self.state = _empty(requests, allowed_s, most_seqs, batches)
        self._free = list(range(_FEWEST_SLOTS))[::-1]

    def advance(self, until_s: float) -> None:
        """Lets everything happen that is due by then."""
        kernel.advance(self.state, self._bounds, until_s)

    def open(self, now_s: float, profile: CapacityProfile | None = None) -> int:
        """Adds an engine that takes requests, and returns its slot; `None`: one like most."""
        self.advance(now_s)
        if not self._free:
            size = len(self.state.engines)
            self.state = _grown(self.state)
            self._free = list(range(size, 2 * size))[::-1]
        slot = self._free.pop()
        self._set_law(slot, profile or self._profile)
        kernel.open_engine(self.state, self._bounds, slot, now_s)
        return slot

    def _set_law(self, slot: int, profile: CapacityProfile) -> None:
        engine = self.state.engines[slot]
        for name in _LAW:
            engine[name] = getattr(profile, name)

    def drain(self, slot: int, now_s: float) -> None:
        """Sends the engine no more requests. What it has stays until `leave` or `close`."""
        self.advance(now_s)
        kernel.stop_routing(self.state, slot, now_s)

    def leave(self, slot: int, now_s: float, stay_until_s: float) -> None:
        """Moves requests that will not finish by `stay_until_s`, as others have room for them.

        Then all that are left go, unless there is no other engine.
        """
        self.advance(now_s)
        if self.num_routable:
            kernel.leave(self.state, self._bounds, slot, now_s, stay_until_s)

    def close(self, slot: int, now_s: float) -> None:
        """Removes the engine: what it still has moves, or waits at the gateway."""
        self.advance(now_s)
        if self.state.engines["route_at"][slot] != kernel.NOBODY:
            kernel.stop_routing(self.state, slot, now_s)
        kernel.close_engine(self.state, self._bounds, slot, now_s)
        self._free.append(slot)

    def begin_batch(self, batch: int, num_lines: int, now_s: float) -> None:
        """Opens a batch, the one behind the last one, with so many lines at once."""
        assert batch == self.state.counts[kernel.BATCHES_KNOWN]
        self.state.counts[kernel.BATCHES_KNOWN] += 1
        self.set_lines(batch, num_lines, now_s)

    def set_lines(self, batch: int, num_lines: int, now_s: float) -> None:
        """Sets how many lines of an open batch may be on engines at once."""
        self.advance(now_s)
        self.state.batches["limit"][batch] = num_lines
        kernel.give_lines(self.state, now_s)

    def end_batch(self, batch: int, now_s: float) -> None:
        """Gives up what has no engine. Lines that have one go on, as long as it does."""
        self.set_lines(batch, 0, now_s)
        state = self.state
        its = state.batches[batch]
        for line in self._lines_back(batch):
            state.requests["status"][line] = kernel.FAILED
        its["back"] = kernel.NOBODY
        state.requests["status"][its["next"] : its["end"]] = kernel.FAILED
        its["next"] = its["end"]
        counts = state.counts
        while (first := counts[kernel.BATCHES_OVER]) < counts[kernel.BATCHES_KNOWN]:
            if state.batches["limit"][first]:
                break
            counts[kernel.BATCHES_OVER] += 1

    def num_lines_on_engines(self, batch: int) -> int:
        """The number of a batch's lines that have an engine."""
        return int(self.state.batches["on_engines"][batch])

    def num_lines_left(self, batch: int) -> int:
        """The number of a batch's lines that have no end yet."""
        its = self.state.batches[batch]
        num_back = sum(1 for _ in self._lines_back(batch))
        return int(its["end"] - its["next"]) + num_back + self.num_lines_on_engines(batch)

    def _lines_back(self, batch: int) -> Iterator[int]:
        """The lines of a batch that came back from an engine, and have none."""
        line = self.state.batches["back"][batch]
        while line != kernel.NOBODY:
            yield line
            line = self.state.requests["link"][line]

    def lines(self) -> LineSums:
        """Returns what there is of lines now."""
        counts = self.state.counts
        return LineSums(
            int(counts[kernel.LINES_ON_ENGINES]),
            int(counts[kernel.LINES_FINISHED]),
            int(counts[kernel.LINES_INPUT_TOKENS]),
            int(counts[kernel.LINES_OUTPUT_TOKENS]),
        )

    @property
    def num_routable(self) -> int:
        """The number of engines that take requests."""
        return int(self.state.counts[kernel.ROUTABLE])

    @property
    def in_flight(self) -> list[int]:
        """The number of requests on each engine, by slot."""
        counts: list[int] = self.state.engines["in_flight"].tolist()
        return counts

    def traffic(self, now_s: float) -> SimulatedTraffic:
        """Returns what a gateway has counted by now."""
        self.advance(now_s)
        counts = self.state.counts
        self._expect_lengths(now_s)
        num_waiting = int(counts[kernel.PARKED])
        since_s = kernel.first_waits_since_s(self.state)
        return SimulatedTraffic(
            at_s=now_s,
            num_arrived=int(counts[kernel.ARRIVED]),
            input_tokens=int(counts[kernel.INPUT_TOKENS]),
            num_finished=int(counts[kernel.FINISHED]),
            output_tokens=int(counts[kernel.OUTPUT_TOKENS]),
            num_waiting=num_waiting,
            oldest_wait_s=max(0.0, float(now_s - since_s)),
            num_in_flight=int(counts[kernel.ON_ENGINES]),
            full_s=kernel.full_for_s(self.state, now_s),
            num_first_tokens=int(counts[kernel.FIRST_TOKENS]),
            num_late=int(counts[kernel.LATE]),
            num_paced=int(counts[kernel.PACED]),
            num_slow=int(counts[kernel.SLOW]),
            work=self._sums(),
        )

    def _sums(self) -> EngineSums:
        engines = self.state.engines
        return EngineSums(
            computed=engines["computed"].copy(),
            emitted=engines["emitted"].copy(),
            num_steps=engines["step"].copy(),
            busy_s=engines["busy_s"].copy(),
        )

    def _expect_lengths(self, now_s: float) -> None:
        """Has the gateway expect answers that are as long as they lately were."""
        counts = self.state.counts
        self._ended.append((now_s, int(counts[kernel.FINISHED]), int(counts[kernel.OUTPUT_TOKENS])))
        while len(self._ended) > 1 and self._ended[1][0] <= now_s - _LENGTH_WINDOW_S:
            self._ended.popleft()
        _, num_before, tokens_before = self._ended[0]
        _, num, tokens = self._ended[-1]
        if num > num_before:
            counts[kernel.EXPECTED_TOKENS] = round((tokens - tokens_before) / (num - num_before))

    def finish(self) -> Answers:
        """Lets every request end on the engines there are now, and returns how each ended."""
        self.advance(float("inf"))
        stall_s = self.state.requests["stall_s"]
        stall_s[stall_s < 0] = 0
        return self._answers(slice(0, self._num_requests))

    def line_answers(self) -> Answers:
        """Returns how lines ended, in order of their batches, once all is finished.

        Seconds count from the submission of their batch.
        """
        return self._answers(slice(self._num_requests, None))

    def _answers(self, of: slice) -> Answers:
        # Copies, so that the table of all requests goes with the engines.
        ends, floor_s = self.state.requests[of], np.float32(self._ttft_floor_s)
        return Answers(
            first_s=ends["first_s"] + floor_s,
            last_s=ends["last_s"] + floor_s,
            stall_s=ends["stall_s"].copy(),
            moves=ends["moves"].copy(),
            status=ends["status"].copy(),
        )


def bounds_of(limits: GatewayLimits, objectives: Objectives | None) -> kernel.GatewayBounds:
    """Returns what a gateway goes by: its limits, and how it deals turns and chooses engines."""
    return kernel.GatewayBounds(
        request_deadline_s=limits.request_deadline_s,
        max_waiting_requests=limits.max_waiting_requests,
        step_tokens=choice_costs.STEP_TOKENS,
        sequence_tokens=choice_costs.SEQUENCE_TOKENS,
        most_in_step=choice_costs.MOST_IN_STEP,
        for_others=choice_costs.FOR_OTHERS,
        same_tokens=choice_costs.SAME_TOKENS,
        drawn_from=choice_costs.DRAWN_FROM,
        as_good_tokens=choice_costs.AS_GOOD_TOKENS,
        wait_share=overdue.WAIT_SHARE,
        overdue_part=overdue.OVERDUE_PART,
        output_weight=OUTPUT_WEIGHT,
        token_s=np.inf if objectives is None else step_places.PLACES_SHARE * objectives.tpot_s,
        look_s=step_places.LOOK_S,
        half_life_s=step_places.HALF_LIFE_S,
        least_busy_s=step_places.LEAST_BUSY_S,
        least_of=step_places.LEAST_OF,
        open_s=step_places.OPEN_S,
    )


def _empty(
    requests: Requests,
    allowed_s: kernel.F32,
    max_num_seqs: int,
    batches: Sequence[SimulatedBatch],
) -> kernel.Kernel:
    arrival_s, input_tokens, output_tokens = _with_lines(requests, batches)
    asked = np.zeros(len(arrival_s), kernel.REQUEST)
    asked["arrival_s"] = arrival_s
    asked["allowed_s"][: len(requests)], asked["allowed_more_s"][: len(requests)] = allowed_s
    asked["input_tokens"] = input_tokens
    asked["output_tokens"] = asked["left"] = output_tokens
    asked["link"] = kernel.NOBODY
    asked["first_s"] = asked["last_s"] = np.nan
    asked["status"] = kernel.PENDING
    sizes = np.array([len(each.lines) for each in batches], np.int32)
    its = np.zeros(len(batches), kernel.BATCH)
    its["end"] = len(requests) + np.cumsum(sizes, dtype=np.int32)
    its["next"] = its["end"] - sizes
    its["back"] = kernel.NOBODY
    counts = np.zeros(kernel.NUM_COUNTS, np.int64)
    counts[kernel.LINES_FROM] = len(requests)
    slots = np.arange(_FEWEST_SLOTS, dtype=np.int32)
    return kernel.Kernel(
        requests=asked,
        engines=_idle(slots),
        batches=its,
        batch_of=np.repeat(np.arange(len(batches), dtype=np.int32), sizes),
        ends=np.zeros((len(slots), max_num_seqs), np.int64),
        event_heap=slots,
        routable=np.zeros_like(slots),
        parked_head=np.full(kernel.NUM_ROWS, kernel.NOBODY, np.int32),
        parked_tail=np.full(kernel.NUM_ROWS, kernel.NOBODY, np.int32),
        counts=counts,
        full_s=np.array([np.inf, 0.0]),
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


def _idle(slots: kernel.I32) -> kernel.Rows:
    """Returns engines that have never opened, each at the place of its slot in the heap."""
    engines = np.zeros(len(slots), kernel.ENGINE)
    engines["event_s"] = engines["leave_by_s"] = np.inf
    engines["mode"] = kernel.IDLE
    engines["head"] = engines["tail"] = engines["route_at"] = kernel.NOBODY
    engines["event_at"] = slots
    return engines


def _grown(state: kernel.Kernel) -> kernel.Kernel:
    """Doubles the slots. The new ones have no event: at the end of the heap they keep its order."""
    size = len(state.engines)
    slots = np.arange(size, 2 * size, dtype=np.int32)
    return state._replace(
        engines=np.concatenate([state.engines, _idle(slots)]),
        ends=np.concatenate([state.ends, np.zeros_like(state.ends)]),
        event_heap=np.concatenate([state.event_heap, slots]),
        routable=np.concatenate([state.routable, np.zeros_like(slots)]),
    )
