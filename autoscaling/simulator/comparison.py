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

from autoscaling.simulator.oracle import OracleBound, OraclePolicy
from autoscaling.simulator.outcome import FleetTimeline, ServiceTimeline, SimulationOutcome
from autoscaling.simulator.policies import POLICIES, STATIC, oracle_of
from autoscaling.simulator.preparation import PreparedRun, UsedPrice
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.engines import GatewayLimits
from serving.domain.capacity.objectives import Objectives

_CONFIDENCE = 0.95
# The share of requests that are to meet both objectives: what the oracle is held to.
SERVICE_LEVEL = 0.99
# Multiples of the bare work that the oracle tries: bursts within a minute need something to spare.
# Observed until now: 1.2 for the days, 1.3 for llm-d's ramp.
_MARGINS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
# Service is shown in about so many intervals, none shorter than what a percentile needs.
_NUM_INTERVALS = 288
_SHORTEST_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one policy in one run. `vs_` are its cost as a multiple of others'.

    `vs_oracle` is against the oracle that keeps the service level, `None` where none does;
    `vs_floor` against the oracle that carries the bare work; `vs_on_demand` against the static
    fleet, `None` where it did not run.
    """

    seed: int
    cost_usd: float
    served_ratio: float
    slo_ratio: float
    mean_slices: float
    peak_slices: float
    ttft_p99_s: float
    tpot_p99_s: float
    vs_floor: float
    vs_oracle: float | None
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
class OracleRun:
    """The oracle in one run: the floor for the bare work, and simulated with a margin.

    `margin` is the least of `_MARGINS` with which enough requests met both objectives; it and its
    results are `None` if none was enough.
    """

    floor: OracleBound
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
    """The result of the comparison. `oracles` has one per seed."""

    scenario: str
    description: str
    profile_source: str
    objectives: Objectives
    duration_s: float
    seeds: tuple[int, ...]
    num_requests: tuple[int, ...]
    mean_demand_slices: float
    policies: tuple[PolicyResult, ...]
    oracles: tuple[OracleRun, ...]
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
        OracleError: the oracle's solver gave up.
    """
    oracles = tuple(
        _oracle_run(run_setup, partial(on_progress, "oracle", run_setup.seed)) for run_setup in runs
    )
    figures: dict[str, list[Figures]] = {name: [] for name in names}
    courses: dict[str, Course] = {}
    for run_setup, oracle in zip(runs, oracles, strict=True):
        for name in names:
            outcome = simulate_policy(run_setup, name, partial(on_progress, name, run_setup.seed))
            figures[name].append(_figures(run_setup, outcome, oracle))
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
        oracles=oracles,
        prices=first.prices,
        trace=trace,
        capacity=capacity,
    )


def _oracle_run(run_setup: PreparedRun, on_progress: Callable[[float], None]) -> OracleRun:
    floor = oracle_of(run_setup)
    for margin in _MARGINS:
        bound = oracle_of(run_setup, margin)
        outcome = simulate(setup_of(run_setup), OraclePolicy(run_setup.terms, bound), on_progress)
        if outcome.service.slo_ratio >= SERVICE_LEVEL:
            return OracleRun(floor, margin, outcome.cost.total_usd, outcome.service.slo_ratio)
    return OracleRun(floor, None, None, None)


def simulate_policy(
    run_setup: PreparedRun, name: str, on_progress: Callable[[float], None] | None = None
) -> SimulationOutcome:
    """Simulates one policy in one run."""
    return simulate(setup_of(run_setup), POLICIES[name](run_setup), on_progress)


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
        "oracle": _oracle_json(comparison.oracles),
        "prices": [_price_json(each) for each in comparison.prices],
    }


_REPORTED = ("cost_usd", "served_ratio", "slo_ratio", "mean_slices", "peak_slices", "vs_floor")
_ONE_SEEDS_OWN = ("vs_oracle", "vs_on_demand", "ttft_p99_s", "tpot_p99_s")


def _oracle_json(oracles: Sequence[OracleRun]) -> dict[str, Any]:
    floors = [each.floor for each in oracles]
    played = [each for each in oracles if each.cost_usd is not None]
    return {
        "cost_usd": statistics.fmean(each.cost_usd for each in floors),
        "bound_usd": statistics.fmean(each.bound_usd for each in floors),
        "short_slice_hours": statistics.fmean(each.short_slice_hours for each in floors),
        "at_service_level": {
            "slo_ratio": SERVICE_LEVEL,
            "by_seed": [
                {"margin": each.margin, "cost_usd": each.cost_usd, "slo_ratio": each.slo_ratio}
                for each in played
            ],
        },
    }


def _policy_json(result: PolicyResult) -> dict[str, Any]:
    spreads = {name: result.spread(name) for name in _REPORTED}
    figures: dict[str, Any] = {name: spread.mean for name, spread in spreads.items()}
    figures |= {name: result.multiple(name) for name in ("vs_oracle", "vs_on_demand")}
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


def _figures(run_setup: PreparedRun, outcome: SimulationOutcome, oracle: OracleRun) -> Figures:
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
        vs_floor=cost_usd / oracle.floor.cost_usd,
        vs_oracle=cost_usd / oracle.cost_usd if oracle.cost_usd else None,
        vs_on_demand=None,
    )
