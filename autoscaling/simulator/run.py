"""Runs a policy against a day: the ticks, its inputs, and the loop around engines and slices.

Owns the setup, the measuring of load as production measures it, and the order of things. Has no
scaling rule: the `records.Policy` that is passed in decides everything.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autoscaling.observations import ASSUMED_TOKENS, Tokens
from autoscaling.records import Fleet, ModelLoad, Observation, Policy
from autoscaling.simulator.outcome import SimulationOutcome, TimelineRecorder, sum_up
from autoscaling.simulator.world.arrivals import Requests, SimulatedBatch
from autoscaling.simulator.world.batch_lane import SimulatedLane
from autoscaling.simulator.world.engines import Engines, GatewayLimits, SimulatedTraffic
from autoscaling.simulator.world.slices import ClassSetup, SliceFleet
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.load_report import are_too_many


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The setup of one simulated day. Times in seconds.

    The policy is asked every `tick_s`. It gets rates over the last `window_s`, measured
    `measurement_delay_s` ago, and `assumed_tokens` until there are measured ones, all as in
    production. `ready_at_start` are slices that exist and are ready at 0. `drain_s` is how long a
    slice that goes is still held. `batches` come beside the requests, in order of submission. After
    `duration_s` nothing changes about the fleet and nothing is paid; requests on engines then
    finish.

    Raises:
        ValueError: a field is out of range, or two classes have one name.
    """

    requests: Requests
    profile: CapacityProfile
    classes: tuple[ClassSetup, ...]
    objectives: Objectives
    duration_s: float = 86_400.0
    seed: int = 0
    tick_s: float = 10.0
    window_s: float = 30.0
    measurement_delay_s: float = 0.0
    assumed_tokens: Tokens = ASSUMED_TOKENS
    drain_s: float = 30.0
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    ready_at_start: Mapping[str, int] = field(default_factory=dict)
    batches: tuple[SimulatedBatch, ...] = ()

    def __post_init__(self) -> None:
        for name in ("duration_s", "tick_s", "window_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; allowed: above 0")
        for name in ("measurement_delay_s", "drain_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; allowed: at least 0")
        names = [each.terms.name for each in self.classes]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"classes are {names}; allowed: one or more, each name once")
        for name, count in self.ready_at_start.items():
            most = {each.terms.name: each.terms.max_slices for each in self.classes}.get(name, 0)
            if not 0 <= count <= most:
                raise ValueError(f"ready_at_start.{name} is {count}; allowed: 0 to {most}")


def simulate(
    setup: SimulationSetup,
    policy: Policy,
    on_progress: Callable[[float], None] | None = None,
) -> SimulationOutcome:
    """Simulates the day under `policy`. The same setup and policy give the same outcome.

    `on_progress` is called with the share that is done, 0 to 1, at every tick.

    Raises:
        ValueError: a plan has a target for an unknown class.
    """
    requests = setup.requests.until(setup.duration_s)
    engines = Engines(requests, setup.profile, setup.limits, setup.objectives, setup.batches)
    lane = SimulatedLane(setup.batches, engines, setup.objectives.tpot_s, setup.tick_s)
    rng = np.random.default_rng(setup.seed)
    fleet = SliceFleet(setup.classes, engines, rng, setup.drain_s)
    for name, count in setup.ready_at_start.items():
        fleet.begin_ready(name, count)
    meter = SimulatedLoad(setup.window_s, setup.measurement_delay_s, setup.assumed_tokens)
    timeline = TimelineRecorder(setup.classes)
    for tick in range(int(np.ceil(setup.duration_s / setup.tick_s))):
        now_s = tick * setup.tick_s
        fleet.advance(now_s)
        traffic = engines.traffic(now_s)
        meter.take(traffic)
        lane.look(now_s, traffic.work, is_pressed=meter.is_pressed)
        views = fleet.views()
        seen = Fleet(views, fleet.targets, fleet.take_losses())
        load = meter.load(fleet.engines())
        if load is not None and lane.has_any:
            load = replace(load, batch_due=lane.due())
        plan = policy.decide(Observation(now_s, load, seen))
        timeline.note(traffic, load, views, plan)
        fleet.apply(plan.targets, plan.drain_order, now_s)
        if on_progress is not None:
            on_progress(now_s / setup.duration_s)
    fleet.advance(setup.duration_s)
    engines.advance(setup.duration_s)
    fleet.close_books(setup.duration_s)
    lane.close(setup.duration_s)
    answers = engines.finish()
    return sum_up(
        policy.name,
        requests,
        answers,
        fleet.records,
        fleet.seconds,
        timeline.close(setup.duration_s),
        setup.classes,
        setup.objectives,
        lane.service(),
    )


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
            num_waiting=last.num_waiting + last.num_held_back,
            oldest_wait_s=last.oldest_wait_s,
            num_in_flight=last.num_in_flight - last.num_held_back,
            full_ratio=sum(each.are_full for each in window) / len(window),
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
