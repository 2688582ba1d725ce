"""The load of a simulated model, measured as production measures it."""

from collections import deque
from collections.abc import Iterable

from autoscaling.observations import Tokens
from autoscaling.records import ModelLoad
from autoscaling.simulator.world.engines import SimulatedTraffic
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.load_report import are_too_many


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
        """Whether too many first tokens of the last window were late, as its gateway sees it."""
        first, last = self._readings[0], self._readings[-1]
        num_late = last.num_late - first.num_late
        return are_too_many(num_late, last.num_first_tokens - first.num_first_tokens - num_late)

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
        num_late = last.num_late - first.num_late
        return ModelLoad(
            at_s=last.at_s,
            requests_per_s=arrived / span_s if span_s > 0 else 0.0,
            input_tokens_mean=self._input_tokens_mean,
            output_tokens_mean=self._output_tokens_mean,
            num_waiting=last.num_waiting,
            oldest_wait_s=last.oldest_wait_s,
            num_in_flight=last.num_in_flight,
            full_ratio=(last.full_s - first.full_s) / span_s if span_s > 0 else 0.0,
            num_ttft_met=last.num_first_tokens - first.num_first_tokens - num_late,
            num_ttft_missed=num_late,
            engines=_engine_rates(engines, first, last),
        )


def _engine_rates(
    engines: Iterable[tuple[int, str, str, float]], first: SimulatedTraffic, last: SimulatedTraffic
) -> tuple[EngineRate, ...]:
    """Returns what the engines did between two readings that were ready at the first one."""
    before, after, span_s = first.work, last.work, last.at_s - first.at_s
    if before is None or after is None or span_s <= 0:
        return ()
    rates = []
    for slot, slice_id, compute_class, ready_at_s in engines:
        if ready_at_s > first.at_s or slot >= len(before.num_steps):
            continue
        num_steps = int(after.num_steps[slot] - before.num_steps[slot])
        if num_steps > 0:
            rates.append(
                EngineRate(
                    slice_id,
                    compute_class,
                    float(after.computed[slot] - before.computed[slot]) / span_s,
                    float(after.emitted[slot] - before.emitted[slot]) / span_s,
                    float(after.busy_s[slot] - before.busy_s[slot]) / num_steps,
                )
            )
    return tuple(rates)
