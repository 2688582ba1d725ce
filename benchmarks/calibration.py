"""The simulator against the live platform: the same requests, the same policy, the same law.

Owns both sides of each comparison: the load on the live platform (paced engines, loaded by
`loadtest`), and the simulation of what was sent. Does not own how it is shown
(`calibration_report`). The simulation is told the instants at which requests were really sent, and
how long slices really took to come and to load; everything else it has to foretell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import numpy as np

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy_config import ModelSettings
from autoscaling.records import Observation, Plan, Policy
from autoscaling.simulator.outcome import tpot_s
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.arrivals import (
    RateProfile,
    Requests,
    build_day,
    draw_poisson,
    stages,
)
from autoscaling.simulator.world.engines import Answers, Engines, GatewayLimits
from autoscaling.simulator.world.slices import ClassSetup, Conditions
from autoscaling.simulator.world.synthetic_traces import TRACE_LAWS, synthetic_hour
from benchmarks.calibration_live import (
    DEADLINE_S,
    LAW,
    PACE,
    SEED,
    TPOT_OBJECTIVE_S,
    Answered,
    ScalingApplication,
    Step,
    answered_of,
    logged_steps,
    send,
    shifted_observation,
    watched_neighbours,
)
from benchmarks.servers import MODEL, slicewise
from serving.config.slice_settings import DRAIN_GRACE_S
from serving.domain.slice_lifecycle import HELD_STATES, SliceState
from tests.e2e.application import paced_model

# Azure's conversations, a tenth as long.
_LENGTHS_SHARE = 0.1
STATIC_ENGINES, STATIC_SHARES, STATIC_S = (1, 2), (0.3, 0.6, 0.85), 60.0
# The scaled run: a trickle into nothing, a rise beyond what reserved and spot carry, and the end.
SCALED_RATES = RateProfile((0, 60, 260, 350, 390, 470), (1.5, 1.5, 12.0, 12.0, 2.0, 2.0))


@dataclass(frozen=True, slots=True)
class StaticRun:
    """So many engines at one share of what the law lets them carry at the TPOT objective.

    `other_cores` are cores that processes of other people used meanwhile.
    """

    num_engines: int
    share: float
    requests_per_s: float
    measured: Answered
    simulated: Answered
    other_cores: float


@dataclass(frozen=True, slots=True)
class Course:
    """One scaled run. Instants of `steps` count from the start of the load."""

    answered: Answered
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ClassTimes:
    """How slices of one class came in the live run, in seconds: one value per slice.

    From the decision until a replica asked for a slice, until it had one, until it was ready.
    """

    until_asked_s: tuple[float, ...] = ()
    until_held_s: tuple[float, ...] = ()
    until_ready_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """Both courses under one policy, and what the simulation was told of the live one.

    `retold` is simulated, too, but follows the live decisions: what is wrong with it is not the
    policy's doing. `report_age_s` is how old the load was that the policy was shown, in the middle.
    """

    settings: ModelSettings
    measured: Course
    simulated: Course
    retold: Course
    times: Mapping[str, ClassTimes]
    report_age_s: float
    other_cores: float


def run_static() -> list[StaticRun]:
    """Without a policy: whether engines, gateway and client are as the simulator has them."""
    runs = []
    lengths = short_conversations()
    for num_engines in STATIC_ENGINES:
        with slicewise(paced_model(num_engines, PACE, name=MODEL)) as server:
            # Imports, caches and connections of the first requests.
            send(server.url, draw_poisson(stages((5, 2)), lengths, SEED))
            for share in STATIC_SHARES:
                rate = share * num_engines * rate_of_law(lengths)
                planned = draw_poisson(stages((STATIC_S, rate)), lengths, SEED)
                with watched_neighbours(server.all_processes) as neighbours:
                    stored = send(server.url, planned)
                sent, measured = answered_of(stored)
                simulated = _simulated(sent, static_answers(sent, num_engines))
                runs.append(
                    StaticRun(num_engines, share, rate, measured, simulated, neighbours.cores)
                )
    return runs


def run_scaled() -> ScaledRun:
    """Under the policy: from zero slices up over all classes and down again."""
    application = ScalingApplication()
    planned = build_day(
        short_conversations(),
        mean_rate=SCALED_RATES.num_expected / SCALED_RATES.times_s[-1],
        seed=SEED,
        profile=SCALED_RATES,
    )
    with application:
        application.wait_empty()
        with watched_neighbours(application.processes) as neighbours:
            stored = send(application.base_url, planned)
        steps = logged_steps(application.decision_log, stored.start.at_unix_s)
    sent, measured = answered_of(stored)
    times = {each.name: _times_of(each.name, steps) for each in application.settings.terms}
    report_age_s = median(
        each.observation.now_s - each.observation.load.at_s
        for each in steps
        if each.observation.load is not None
    )
    settings = application.settings
    world = SimulatedWorld(settings, sent, steps, times, report_age_s)
    return ScaledRun(
        settings,
        Course(measured, steps),
        world.course(SlicewisePolicy(settings.profile, settings.terms, settings.rules)),
        world.course(_LivePlans(steps)),
        times,
        report_age_s,
        neighbours.cores,
    )


def short_conversations() -> Requests:
    """An hour like Azure's conversations, with prompts and answers cut down by one factor."""
    hour = synthetic_hour(TRACE_LAWS["azure-conv"], SEED)
    return Requests(
        hour.arrival_s,
        np.maximum(1, np.rint(hour.input_tokens * _LENGTHS_SHARE)).astype(np.int32),
        np.maximum(2, np.rint(hour.output_tokens * _LENGTHS_SHARE)).astype(np.int32),
    )


def rate_of_law(lengths: Requests) -> float:
    """Requests per second that one engine carries at the TPOT objective."""
    return LAW.max_requests_per_s(
        float(lengths.input_tokens.mean()), float(lengths.output_tokens.mean()), TPOT_OBJECTIVE_S
    )


def static_answers(requests: Requests, num_engines: int) -> Answers:
    """What the simulator makes of `requests` on engines that are there from the beginning."""
    engines = Engines(requests, LAW, GatewayLimits(DEADLINE_S))
    for _ in range(num_engines):
        engines.open(0.0)
    return engines.finish()


@dataclass(frozen=True, slots=True)
class SimulatedWorld:
    """The live run once more, in the simulator, from the first of the `live` decisions on."""

    settings: ModelSettings
    sent: Requests
    live: Sequence[Step]
    times: Mapping[str, ClassTimes]
    report_age_s: float

    def course(self, policy: Policy) -> Course:
        """What becomes of it under `policy`, whose clock is the live run's."""
        begin_s, end_s = self.live[0].plan.at_s, self.live[-1].plan.at_s
        noting = _Noting(policy, begin_s)
        outcome = simulate(self._setup(begin_s, end_s), noting)
        answered = _simulated(outcome.requests, outcome.answers)
        shifted = replace(answered, sent_s=answered.sent_s + begin_s)
        return Course(shifted, tuple(noting.steps))

    def _setup(self, begin_s: float, end_s: float) -> SimulationSetup:
        sent = self.sent
        return SimulationSetup(
            requests=Requests(sent.arrival_s - begin_s, sent.input_tokens, sent.output_tokens),
            profile=self.settings.profile,
            classes=tuple(
                ClassSetup(terms, _conditions(self.times, terms.name))
                for terms in self.settings.terms
            ),
            objectives=self.settings.rules.objectives,
            duration_s=end_s - begin_s,
            tick_s=median(np.diff([each.plan.at_s for each in self.live]).tolist()),
            measurement_delay_s=self.report_age_s,
            assumed_tokens=self.settings.assumed,
            drain_s=DRAIN_GRACE_S,
            limits=GatewayLimits(DEADLINE_S),
        )


@dataclass(slots=True)
class _Noting:
    """A policy whose clock begins at `begin_s`, and what it saw and said by that clock."""

    policy: Policy
    begin_s: float
    steps: list[Step] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, observation: Observation) -> Plan:
        seen = shifted_observation(observation, self.begin_s)
        plan = self.policy.decide(seen)
        self.steps.append(Step(seen, plan))
        return replace(plan, at_s=plan.at_s - self.begin_s)


@dataclass(frozen=True, slots=True)
class _LivePlans:
    """Says at every instant what the live policy had said by then."""

    live: Sequence[Step]
    name: str = "live decisions"

    def decide(self, observation: Observation) -> Plan:
        said = [each.plan for each in self.live if each.plan.at_s <= observation.now_s]
        return replace((said or [self.live[0].plan])[-1], at_s=observation.now_s)


def _simulated(requests: Requests, answers: Answers) -> Answered:
    return Answered(
        requests.arrival_s,
        answers.first_s.astype(np.float64),
        tpot_s(requests, answers).astype(np.float64),
    )


def _times_of(name: str, steps: Sequence[Step]) -> ClassTimes:
    """How each slice of a class came that is ready now or was, in order of the wishes for them."""
    wished_s: list[float] = []
    for before, after in pairwise(steps):
        more = after.plan.targets[name] - before.plan.targets[name]
        wished_s += [after.plan.at_s] * max(0, more)
    asked_s: dict[str, float] = {}
    held_s: dict[str, float] = {}
    ready_s: dict[str, float] = {}
    for view in (view for step in steps for view in step.observation.fleet.of_class(name)):
        asked_s.setdefault(view.slice_id, view.requested_at_s)
        if view.state in HELD_STATES:
            held_s.setdefault(view.slice_id, view.since_s)
        if view.state == SliceState.READY:
            ready_s.setdefault(view.slice_id, view.since_s)
    came = sorted(asked_s, key=asked_s.__getitem__)
    whole = [
        (asked_s[each] - at_s, held_s[each] - at_s, ready_s[each] - at_s)
        for each, at_s in zip(came, wished_s, strict=False)
        if each in ready_s
    ]
    return ClassTimes(*zip(*whole, strict=True)) if whole else ClassTimes()


def _conditions(times: Mapping[str, ClassTimes], name: str) -> Conditions:
    """The live times of a class, in the middle; of all classes where it brought no slice."""
    own = times[name]
    known = [own] if own.until_ready_s else list(times.values())
    held_s = median(value for each in known for value in each.until_held_s)
    ready_s = median(value for each in known for value in each.until_ready_s)
    return Conditions(
        capacity=None,
        provisioning_s=held_s,
        load_s=ready_s - held_s,
        losses_per_hour=0.0,
        provisioning_spread=0.0,
        load_spread=0.0,
        probe_s=0.0,
    )
