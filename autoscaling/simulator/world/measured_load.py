"""The load of a simulated model, measured as production measures it."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from autoscaling.observations import Tokens
from autoscaling.records import ModelLoad
from autoscaling.simulator.world.engines import SimulatedTraffic
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.load_report import JudgedRequests, misses_objectives


class SimulatedLoad:
    """Turns counts into the load that a policy is shown.

    Token means come from the last window in which there was something to average; until there has
    been one, they are the `assumed` ones. A load is measured once the delay has passed, and is
    `None` before.
    """

    def __init__(self, window_s: float, delay_s: float, assumed: Tokens) -> None:
        self._window_s = window_s
        self._delay_s = delay_s
        self._readings: deque[SimulatedTraffic] = deque()
        self._input_tokens_mean = assumed.input
        self._output_tokens_mean = assumed.output

    def take(self, reading: SimulatedTraffic) -> None:
        """Adds one reading; times never run backwards."""
        self._readings.append(reading)
        oldest_s = reading.at_s - self._delay_s - self._window_s
        while len(self._readings) > 1 and self._readings[1].at_s <= oldest_s:
            self._readings.popleft()

    @property
    def is_pressed(self) -> bool:
        """Whether too many requests of the last window missed an objective, as its gateway sees it.

        That of the first token, or that of later ones.
        """
        return misses_objectives(_judged(self._readings[0], self._readings[-1]))

    def load(self, engines: Iterable[tuple[int, str, str, float]] = ()) -> ModelLoad | None:
        """The load as of the latest reading that is not younger than the delay.

        `engines` are the ready slices: slot, id, class, and since when.
        """
        if not self._readings:
            return None
        latest_s = self._readings[-1].at_s - self._delay_s
        known = [each for each in self._readings if each.at_s <= latest_s]
        if not known:
            return None
        last = known[-1]
        window = [each for each in known if each.at_s >= last.at_s - self._window_s]
        first = window[0]
        span_s = last.at_s - first.at_s
        arrived = last.num_arrived - first.num_arrived
        finished = last.num_finished - first.num_finished
        # A gateway counts the tokens of a prompt when it admits the request.
        if arrived and arrived + first.num_waiting > last.num_waiting:
            self._input_tokens_mean = (last.input_tokens - first.input_tokens) / arrived
        if finished:
            self._output_tokens_mean = (last.output_tokens - first.output_tokens) / finished
        judged = _judged(first, last)
        return ModelLoad(
            at_s=last.at_s,
            requests_per_s=arrived / span_s if span_s > 0 else 0.0,
            input_tokens_mean=self._input_tokens_mean,
            output_tokens_mean=self._output_tokens_mean,
            num_waiting=last.num_waiting,
            oldest_wait_s=last.oldest_wait_s,
            num_in_flight=last.num_in_flight,
            full_ratio=(last.full_s - first.full_s) / span_s if span_s > 0 else 0.0,
            num_ttft_met=judged.num_ttft_met,
            num_ttft_missed=judged.num_ttft_missed,
            num_tpot_met=judged.num_tpot_met,
            num_tpot_missed=judged.num_tpot_missed,
            engines=_engine_rates(engines, first, last),
        )


def _judged(first: SimulatedTraffic, last: SimulatedTraffic) -> JudgedRequests:
    """Returns what kept to the objectives between two readings, and what did not."""
    num_late, num_slow = last.num_late - first.num_late, last.num_slow - first.num_slow
    return JudgedRequests(
        num_ttft_met=last.num_first_tokens - first.num_first_tokens - num_late,
        num_ttft_missed=num_late,
        num_tpot_met=last.num_paced - first.num_paced - num_slow,
        num_tpot_missed=num_slow,
    )


def _engine_rates(
    engines: Iterable[tuple[int, str, str, float]], first: SimulatedTraffic, last: SimulatedTraffic
) -> tuple[EngineRate, ...]:
    """Returns what the engines did between two readings that were ready at the first one."""
    before, after, span_s = first.work, last.work, last.at_s - first.at_s
    if before is None or after is None or span_s <= 0:
        return ()
    num_before = len(before.num_steps)
    computed, emitted = (
        _risen(before.computed, after.computed),
        _risen(before.emitted, after.emitted),
    )
    steps, busy_s = _risen(before.num_steps, after.num_steps), _risen(before.busy_s, after.busy_s)
    return tuple(
        EngineRate(
            slice_id,
            compute_class,
            computed[slot] / span_s,
            emitted[slot] / span_s,
            busy_s[slot] / steps[slot],
        )
        for slot, slice_id, compute_class, ready_at_s in engines
        if ready_at_s <= first.at_s and slot < num_before and steps[slot] > 0
    )


def _risen(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> list[Any]:
    """Returns by how much the sums of the slots have risen that there were before."""
    risen: list[Any] = (after[: len(before)] - before).tolist()
    return risen
