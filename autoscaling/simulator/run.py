"""Runs policies against a day: the ticks, their inputs, and the loop around engines and slices.

Owns the setup and the order of things, for one model and for several that share quotas. Has no
scaling rule: the `records.Policy` that is passed in decides everything.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoscaling.observations import ASSUMED_TOKENS, Tokens
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.chip_book import ChipBook
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.records import Fleet, Observation, Plan, Policy
from autoscaling.simulator.outcome import SimulationOutcome, TimelineRecorder, sum_up
from autoscaling.simulator.world.arrivals import Requests, SimulatedBatch
from autoscaling.simulator.world.batch_lane import SimulatedLane
from autoscaling.simulator.world.engines import Engines, GatewayLimits, SimulatedTraffic
from autoscaling.simulator.world.measured_load import SimulatedLoad
from autoscaling.simulator.world.slices import ChipPool, ClassSetup, Pools, SliceFleet
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile


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


class SimulatedModel:
    """One model's day on its way: its engines and slices, and what a policy observes of them.

    At each tick it is observed, then it follows a plan.
    """

    def __init__(self, setup: SimulationSetup, pools: Pools | None = None) -> None:
        """Begins the day; `pools` are the chips that it shares with other models, by class."""
        self._setup = setup
        self._requests = setup.requests.until(setup.duration_s)
        self._engines = Engines(
            self._requests,
            setup.profile,
            setup.limits,
            setup.objectives,
            setup.batches,
            [each.profile for each in setup.classes if each.profile is not None],
        )
        self._lane = SimulatedLane(
            setup.batches, self._engines, setup.objectives.tpot_s, setup.tick_s
        )
        rng = np.random.default_rng(setup.seed)
        self._fleet = SliceFleet(setup.classes, self._engines, rng, setup.drain_s, pools or {})
        for name, count in setup.ready_at_start.items():
            self._fleet.begin_ready(name, count)
        self._meter = SimulatedLoad(setup.window_s, setup.measurement_delay_s, setup.assumed_tokens)
        self._timeline = TimelineRecorder(setup.classes)
        self._traffic: SimulatedTraffic | None = None
        self._observed: Observation | None = None

    def observe(self, now_s: float) -> Observation:
        """Lets everything happen that is due by then; returns what the policy is shown."""
        fleet = self._fleet
        fleet.advance(now_s)
        self._traffic = traffic = self._engines.traffic(now_s)
        self._meter.take(traffic)
        self._lane.look(now_s, traffic.work, is_pressed=self._meter.is_pressed)
        load = self._meter.load(fleet.engines())
        if load is not None and self._lane.has_any:
            load = replace(load, batch_due=self._lane.due())
        seen = Fleet(fleet.views(), fleet.targets, fleet.take_losses())
        self._observed = Observation(now_s, load, seen)
        return self._observed

    @property
    def targets(self) -> Mapping[str, int]:
        """The slices that each class was last asked for."""
        return self._fleet.targets

    def follow(self, plan: Plan) -> None:
        """Does what the plan says for what was observed last."""
        assert self._observed is not None  # `observe` comes first
        assert self._traffic is not None
        now_s, load, seen = self._observed.now_s, self._observed.load, self._observed.fleet
        self._timeline.note(self._traffic, load, seen.slices, plan)
        self._fleet.apply(plan.targets, plan.drain_order, now_s)

    def end(self, policy_name: str) -> SimulationOutcome:
        """Ends the day; returns how it was."""
        setup = self._setup
        self._fleet.advance(setup.duration_s)
        self._engines.advance(setup.duration_s)
        self._fleet.close_books(setup.duration_s)
        self._lane.close(setup.duration_s)
        answers = self._engines.finish()
        return sum_up(
            policy_name,
            self._requests,
            answers,
            self._fleet.records,
            self._fleet.seconds,
            self._timeline.close(setup.duration_s),
            setup.classes,
            setup.objectives,
            self._lane.service(),
        )


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
    day = SimulatedModel(setup)
    for now_s in _ticks(setup):
        day.follow(policy.decide(day.observe(now_s)))
        if on_progress is not None:
            on_progress(now_s / setup.duration_s)
    return day.end(policy.name)


def simulate_together(
    setups: Mapping[str, SimulationSetup],
    policies: Mapping[str, SlicewisePolicy],
    quotas: Sequence[ChipQuota],
    members: Sequence[Member],
    *,
    shares: bool = True,
) -> Mapping[str, SimulationOutcome]:
    """Simulates a day of several models whose slices have the chips of `quotas` together.

    All three are by the name of the model. Without `shares` each policy plans as if all of a quota
    were its own, and whoever orders first has it. A chip that one model gives up is another's at
    the next tick.

    Raises:
        ValueError: days differ in length or tick, or what is ready at the start exceeds a quota.
    """
    (ticks,) = {tuple(_ticks(each)) for each in setups.values()}
    pools = _pools(quotas, members)
    days = {model: SimulatedModel(setup, pools.get(model)) for model, setup in setups.items()}
    for now_s in ticks:
        asked = {model: policies[model].ask(day.observe(now_s)) for model, day in days.items()}
        fixed = {model: day.targets for model, day in days.items() if asked[model] is None}
        book = ChipBook(quotas if shares else (), members, asked, fixed)
        plans = {}
        for model, share in book.in_turn(days):
            plans[model] = policies[model].plan(share)
            book.take(model, plans[model].targets)
        for model, day in days.items():
            day.follow(plans[model])
    return {model: day.end(policies[model].name) for model, day in days.items()}


def _ticks(setup: SimulationSetup) -> Iterable[float]:
    count = int(np.ceil(setup.duration_s / setup.tick_s))
    return (tick * setup.tick_s for tick in range(count))


def _pools(quotas: Sequence[ChipQuota], members: Sequence[Member]) -> Mapping[str, Pools]:
    """Returns the pools of each model, by class, and how many chips a slice of it takes."""
    pools: dict[str, dict[str, tuple[ChipPool, int]]] = {each.model: {} for each in members}
    for quota in quotas:
        pool = ChipPool(quota.max_chips)
        for member in members:
            if member.model in quota.models:
                name = quota.compute_class
                pools[member.model][name] = (pool, member.chips_of(name))
    return pools
