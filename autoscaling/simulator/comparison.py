"""Compares policies over the seeds of a scenario: each run, its figures, their spread.

Owns the simulation of every policy in every run and the statistics over seeds. Does not own how
they are shown (`tables`, `report`).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from scipy.stats import t as student_t

from autoscaling.simulator.bounds.hindsight import HindsightPolicy
from autoscaling.simulator.bounds.yardsticks import SERVICE_LEVEL, hindsight_of, lower_bound_of
from autoscaling.simulator.outcome import FleetTimeline, ServiceTimeline, SimulationOutcome
from autoscaling.simulator.policies import STATIC, make_policy
from autoscaling.simulator.preparation import PreparedRun, UsedPrice
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.engines import GatewayLimits
from serving.domain.capacity.objectives import Objectives

_CONFIDENCE = 0.95
# Multiples of the demand that plans with hindsight are tried for, the least first: bursts within a
# minute need something to spare. Observed until now: 1.2 for conversations, 1.3 for llm-d's ramp,
# 1.7 for code.
_MARGINS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5)
# Between the first that keeps the level and the one before it so many more are tried, each in the
# middle of what is left.
_NUM_BETWEEN = 2
# Service is shown in about so many intervals, none shorter than what a percentile needs.
_NUM_INTERVALS = 288
_SHORTEST_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one policy in one run. `vs_` are its cost as a multiple of others'.

    `vs_lower_bound` is against what no policy that keeps the service level can cost less than;
    `vs_hindsight` against the plan with hindsight that keeps it, `None` where none does;
    `vs_on_demand` against the static fleet, `None` where it did not run.
    """

    seed: int
    cost_usd: float
    served_ratio: float
    slo_ratio: float
    mean_slices: float
    peak_slices: float
    ttft_p99_s: float
    tpot_p99_s: float
    vs_lower_bound: float
    vs_hindsight: float | None
    vs_on_demand: float | None


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """The spread over seeds; `margin` is half the mean's 95 % interval, `None` with one seed."""

    mean: float
    margin: float | None
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "SeedSpread":
        """The spread of at least one value."""
        margin = None
        if len(values) > 1:
            quantile = float(student_t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1))
            margin = quantile * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), margin, min(values), max(values))


@dataclass(frozen=True, slots=True)
class Course:
    """The course of the first run over time, for the report."""

    timeline: FleetTimeline
    service: ServiceTimeline

    @classmethod
    def of(cls, outcome: SimulationOutcome) -> "Course":
        """The course of an outcome, without its millions of requests."""
        interval_s = max(_SHORTEST_INTERVAL_S, outcome.timeline.end_s / _NUM_INTERVALS)
        return cls(outcome.timeline, outcome.service_timeline(interval_s))


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """What the costs of one run are measured against: a lower bound, and a plan with hindsight.

    `margin` is that of the cheapest plan that was found with which enough requests met both
    objectives when it was followed; it and its results are `None` if none was enough.
    """

    lower_bound_usd: float
    margin: float | None
    cost_usd: float | None
    slo_ratio: float | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The result of one policy over all seeds, with the course of the first."""

    name: str
    runs: tuple[Figures, ...]
    course: Course

    def spread(self, figure: str) -> SeedSpread:
        """The spread of a figure that every run has, by its name."""
        return SeedSpread.of([getattr(each, figure) for each in self.runs])

    def multiple(self, figure: str) -> float | None:
        """The mean of a multiple by its name; `None` if a run has none."""
        values = [getattr(each, figure) for each in self.runs]
        return None if None in values else statistics.fmean(values)


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """The result of the comparison. `yardsticks` has one per seed."""

    scenario: str
    description: str
    profile_source: str
    objectives: Objectives
    duration_s: float
    seeds: tuple[int, ...]
    num_requests: tuple[int, ...]
    mean_demand_slices: float
    policies: tuple[PolicyResult, ...]
    yardsticks: tuple[Yardsticks, ...]
    prices: tuple[UsedPrice, ...]
    trace: str
    capacity: str

    def policy(self, name: str) -> PolicyResult:
        """The result of one policy, which took part."""
        return next(each for each in self.policies if each.name == name)


def compare(
    runs: Sequence[PreparedRun],
    names: Sequence[str],
    on_progress: Callable[[str, int, float], None],
    *,
    trace: str,
    capacity: str,
) -> PolicyComparison:
    """Simulates every policy of `names` in every run.

    `on_progress` gets policy, seed and the share done. `trace` and `capacity` are the sources of
    requests and of spot capacity, in words.

    Raises:
        HindsightError: the solver gave up.
        LowerBoundError: the classes cannot carry the work.
    """
    yardsticks = tuple(
        yardsticks_of(run_setup, partial(on_progress, "hindsight", run_setup.seed))
        for run_setup in runs
    )
    figures: dict[str, list[Figures]] = {name: [] for name in names}
    courses: dict[str, Course] = {}
    for run_setup, yardstick in zip(runs, yardsticks, strict=True):
        for name in names:
            outcome = simulate_policy(run_setup, name, partial(on_progress, name, run_setup.seed))
            figures[name].append(_figures(run_setup, outcome, yardstick))
            courses.setdefault(name, Course.of(outcome))
    if STATIC in figures:
        _set_against(figures, figures[STATIC])
    first = runs[0]
    return PolicyComparison(
        scenario=first.scenario.name,
        description=first.scenario.description,
        profile_source=first.scenario.profile.source,
        objectives=first.rules.objectives,
        duration_s=first.scenario.duration_s,
        seeds=tuple(run_setup.seed for run_setup in runs),
        num_requests=tuple(len(run_setup.requests) for run_setup in runs),
        mean_demand_slices=statistics.fmean(run_setup.offered.mean_slices for run_setup in runs),
        policies=tuple(PolicyResult(name, tuple(figures[name]), courses[name]) for name in names),
        yardsticks=yardsticks,
        prices=first.prices,
        trace=trace,
        capacity=capacity,
    )


def yardsticks_of(
    run_setup: PreparedRun,
    on_progress: Callable[[float], None] | None = None,
    *,
    floor_ratio: float = 0.0,
) -> Yardsticks:
    """The yardsticks of a run. Plans with hindsight are simulated until one keeps the level.

    The cheapest that is found counts: how well a plan serves does not only rise with its margin.
    They keep a floor of `floor_ratio`, as `HindsightProblem` says.

    Raises:
        HindsightError: the solver gave up.
        LowerBoundError: the classes cannot carry the work.
    """
    least_usd = lower_bound_of(run_setup)

    def tried(margin: float) -> Yardsticks | None:
        """Returns the plan with so much to spare; `None` if it does not keep the level."""
        known = hindsight_of(run_setup, margin, floor_ratio=floor_ratio)
        policy = HindsightPolicy(run_setup.terms, known)
        outcome = simulate(setup_of(run_setup), policy, on_progress)
        slo_ratio = outcome.service.slo_ratio
        if slo_ratio < SERVICE_LEVEL:
            return None
        return Yardsticks(least_usd, margin, outcome.cost.total_usd, slo_ratio)

    return cheapest_kept(tried) or Yardsticks(least_usd, None, None, None)


def cheapest_kept(tried: Callable[[float], Yardsticks | None]) -> Yardsticks | None:
    """Returns the cheapest plan that is found to keep the level; `None` if none does."""
    too_little = 0.0
    for margin in _MARGINS:
        best = tried(margin)
        if best is None:
            too_little = margin
            continue
        enough = margin
        for _ in range(_NUM_BETWEEN if too_little else 0):
            between = (too_little + enough) / 2
            found = tried(between)
            if found is None:
                too_little = between
            else:
                enough = between
                best = min(best, found, key=lambda each: each.cost_usd or math.inf)
        return best
    return None


def simulate_policy(
    run_setup: PreparedRun, name: str, on_progress: Callable[[float], None] | None = None
) -> SimulationOutcome:
    """Simulates one policy in one run."""
    return simulate(setup_of(run_setup), make_policy(run_setup, name), on_progress)


def setup_of(run_setup: PreparedRun) -> SimulationSetup:
    """The run as the simulator takes it."""
    scenario = run_setup.scenario
    return SimulationSetup(
        requests=run_setup.requests,
        profile=scenario.profile,
        classes=run_setup.classes,
        objectives=run_setup.rules.objectives,
        duration_s=scenario.duration_s,
        seed=run_setup.seed,
        limits=GatewayLimits(request_deadline_s=scenario.request_deadline_s),
        ready_at_start=scenario.initial_slices,
    )


def as_json(comparison: PolicyComparison) -> dict[str, Any]:
    """The comparison for machines: means over the seeds, and per figure the spread."""
    return {
        "scenario": comparison.scenario,
        "seeds": list(comparison.seeds),
        "duration_s": comparison.duration_s,
        "objectives": asdict(comparison.objectives),
        "num_requests": list(comparison.num_requests),
        "mean_demand_slices": comparison.mean_demand_slices,
        "trace": comparison.trace,
        "capacity": comparison.capacity,
        "profile_source": comparison.profile_source,
        "policies": {each.name: _policy_json(each) for each in comparison.policies},
        **_yardsticks_json(comparison.yardsticks),
        "prices": [_price_json(each) for each in comparison.prices],
    }


_REPORTED = (
    "cost_usd",
    "served_ratio",
    "slo_ratio",
    "mean_slices",
    "peak_slices",
    "vs_lower_bound",
)
_ONE_SEEDS_OWN = ("vs_hindsight", "vs_on_demand", "ttft_p99_s", "tpot_p99_s")


def _yardsticks_json(yardsticks: Sequence[Yardsticks]) -> dict[str, Any]:
    return {
        "lower_bound": {
            "cost_usd": statistics.fmean(each.lower_bound_usd for each in yardsticks),
            "by_seed": [each.lower_bound_usd for each in yardsticks],
        },
        "hindsight": {
            "slo_ratio": SERVICE_LEVEL,
            "by_seed": [
                {"margin": each.margin, "cost_usd": each.cost_usd, "slo_ratio": each.slo_ratio}
                for each in yardsticks
                if each.cost_usd is not None
            ],
        },
    }


def _policy_json(result: PolicyResult) -> dict[str, Any]:
    spreads = {name: result.spread(name) for name in _REPORTED}
    figures: dict[str, Any] = {name: spread.mean for name, spread in spreads.items()}
    figures |= {name: result.multiple(name) for name in ("vs_hindsight", "vs_on_demand")}
    figures["spread"] = {
        name: {"margin_95": spread.margin, "lowest": spread.lowest, "highest": spread.highest}
        for name, spread in spreads.items()
    }
    figures["by_seed"] = [
        {name: _finite(getattr(each, name)) for name in ("seed", *_REPORTED, *_ONE_SEEDS_OWN)}
        for each in result.runs
    ]
    return figures


def _finite(value: float | None) -> float | None:
    """Returns `None` for NaN and infinity: JSON cannot express the percentile of an empty set."""
    return value if value is not None and math.isfinite(value) else None


def _price_json(used: UsedPrice) -> dict[str, Any]:
    listed = {"source": "the scenario"} if used.price is None else asdict(used.price)
    return {
        "compute_class": used.compute_class,
        "usd_per_slice_hour": used.usd_per_slice_hour,
        **listed,
    }


def _set_against(figures: dict[str, list[Figures]], static: Sequence[Figures]) -> None:
    """Fills in each cost as a multiple of the static fleet's, seed by seed."""
    for name, runs in figures.items():
        figures[name] = [
            replace(run, vs_on_demand=run.cost_usd / base.cost_usd)
            for run, base in zip(runs, static, strict=True)
        ]


def _figures(run_setup: PreparedRun, outcome: SimulationOutcome, yardstick: Yardsticks) -> Figures:
    cost_usd = outcome.cost.total_usd
    return Figures(
        seed=run_setup.seed,
        cost_usd=cost_usd,
        served_ratio=outcome.service.served_ratio,
        slo_ratio=outcome.service.slo_ratio,
        mean_slices=outcome.mean_slices,
        peak_slices=outcome.peak_slices,
        ttft_p99_s=outcome.service.ttft_s[99],
        tpot_p99_s=outcome.service.tpot_s[99],
        vs_lower_bound=cost_usd / yardstick.lower_bound_usd,
        vs_hindsight=cost_usd / yardstick.cost_usd if yardstick.cost_usd else None,
        vs_on_demand=None,
    )
