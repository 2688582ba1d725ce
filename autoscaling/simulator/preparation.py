"""Prepares a run from a scenario and a seed: requests, compute classes, prices, demand.

Owns where each of them comes from: the scenario's own generators, or files that replace them. Does
not own the simulation (`run`) or the policies (`policies`). Reads trace files. Chance comes in as
a seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoscaling.policy.rules import Rules
from autoscaling.prices.table import Price, PricedMarket, PriceTable
from autoscaling.simulator.offered import Offered, offered_slices, slices_per_request_per_s
from autoscaling.simulator.scenario import (
    AlwaysCapacity,
    DayLoad,
    RegimeCapacity,
    Scenario,
    ScenarioClass,
    ScenarioError,
    StagesLoad,
    StepsCapacity,
)
from autoscaling.simulator.world.arrivals import (
    Requests,
    build_day,
    constant_lengths,
    draw_poisson,
    stages,
    weekday,
)
from autoscaling.simulator.world.slices import ClassSetup, Conditions
from autoscaling.simulator.world.spot_capacity import (
    REGIMES,
    CapacitySeries,
    generate,
    read_spot_trace,
)
from autoscaling.simulator.world.synthetic_traces import TRACE_LAWS, synthetic_hour
from loadtest.workload.traces import read_trace
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.topology import slice_shape

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Replacements:
    """The files that replace a scenario's generators; spot files go to spot classes in order."""

    trace: Path | None = None
    spot: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class UsedPrice:
    """The hourly price of a class's slice.

    `price` is `None` where the scenario gives its own figure.
    """

    compute_class: str
    usd_per_slice_hour: float
    price: Price | None


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The inputs of one run, ready for any policy."""

    scenario: Scenario
    seed: int
    requests: Requests
    classes: tuple[ClassSetup, ...]
    rules: Rules
    offered: Offered
    prices: tuple[UsedPrice, ...]

    @property
    def terms(self) -> tuple[ComputeClass, ...]:
        """The terms of every class, in the scenario's order."""
        return tuple(each.terms for each in self.classes)

    @property
    def profiles(self) -> dict[str, CapacityProfile]:
        """What slices of another shape than the scenario's carry, by class."""
        return {each.terms.name: each.profile for each in self.classes if each.profile is not None}

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """The mean input and output tokens of all requests."""
        return (
            float(self.requests.input_tokens.mean()),
            float(self.requests.output_tokens.mean()),
        )


def prepare_run(
    scenario: Scenario,
    seed: int,
    prices: PriceTable,
    files: Replacements,
    given: Requests | None = None,
) -> PreparedRun:
    """The run of `scenario` with `seed`; `given` are requests in place of those of its load.

    Raises:
        ScenarioError: a regime is unknown, there are more spot files than spot classes, nothing
            arrives, or the trace has no times or lengths.
        PriceError: a class has no price.
        TraceError: the trace file is no trace.
        SpotTraceError: a spot file is no spot trace.
    """
    requests = given if given is not None else _requests(scenario, seed, files.trace)
    if not len(requests):
        raise ScenarioError(f"{scenario.name}: no request arrives in {scenario.duration_s:g} s")
    used = tuple(_price(each, scenario, prices) for each in scenario.classes)
    usd = {each.compute_class: each.usd_per_slice_hour for each in used}
    recorded = _recorded_spot(scenario, files.spot, seed)
    classes = tuple(
        _class_setup(each, scenario, usd[each.name], seed, recorded.get(each.name))
        for each in scenario.classes
    )
    objectives = scenario.objectives.objectives
    offered = offered_slices(
        requests.arrival_s,
        requests.input_tokens,
        requests.output_tokens,
        scenario.profile,
        tpot_s=objectives.tpot_s,
        duration_s=scenario.duration_s,
    )
    rules = Rules(
        objectives,
        min_slices=scenario.rules.min_slices,
        max_slices=scenario.rules.max_slices,
    )
    if scenario.rules.floor_ratio is not None:
        rules = replace(rules, floor_ratio=scenario.rules.floor_ratio)
    return PreparedRun(scenario, seed, requests, classes, rules, offered, used)


def _requests(scenario: Scenario, seed: int, trace: Path | None) -> Requests:
    load, recorded = scenario.load, None if trace is None else requests_of_file(trace)
    if isinstance(load, StagesLoad):
        shape = stages(*((each.seconds, each.requests_per_s) for each in load.stages))
        lengths = recorded or constant_lengths(load.input_tokens, load.output_tokens)
        return draw_poisson(shape, lengths, seed).until(scenario.duration_s)
    hour = recorded or synthetic_hour(TRACE_LAWS[load.trace], seed)
    rate = _mean_rate(load, scenario, hour)
    days = math.ceil(scenario.duration_s / _DAY_S)
    day = build_day(hour, mean_rate=rate, seed=seed, profile=weekday(1.0, days))
    return day.until(scenario.duration_s)


def _mean_rate(load: DayLoad, scenario: Scenario, hour: Requests) -> float:
    if load.mean_requests_per_s is not None:
        return load.mean_requests_per_s
    # A scenario has exactly one of the two.
    assert load.mean_slices is not None
    return load.mean_slices / slices_per_request_per_s(
        scenario.profile,
        float(hour.input_tokens.mean()),
        float(hour.output_tokens.mean()),
        scenario.objectives.tpot_s,
    )


def requests_of_file(path: Path) -> Requests:
    """The requests of a trace file.

    Raises:
        TraceError: it is no trace.
        ScenarioError: its rows have no times or no lengths.
    """
    rows = []
    for number, row in enumerate(read_trace(path).rows, start=1):
        if row.offset_s is None or row.input_tokens is None or row.output_tokens is None:
            raise ScenarioError(f"{path}: row {number} has no time, or no count of tokens")
        rows.append((row.offset_s, row.input_tokens, row.output_tokens))
    if not rows:
        raise ScenarioError(f"{path} has no rows")
    return Requests.of_rows(rows)


def _price(config: ScenarioClass, scenario: Scenario, prices: PriceTable) -> UsedPrice:
    if config.usd_per_slice_hour is not None:
        return UsedPrice(config.name, config.usd_per_slice_hour, None)
    profile = scenario.profile_of(config)
    # A scenario without them names every price itself.
    assert profile.generation is not None
    assert profile.topology is not None
    price = prices.lookup(config.market, profile.generation, config.region or scenario.region)
    chips = profile.num_slices * slice_shape(profile.generation, profile.topology).num_chips
    return UsedPrice(config.name, price.usd_per_chip_hour * chips, price)


def _recorded_spot(
    scenario: Scenario, paths: Sequence[Path], seed: int
) -> Mapping[str, CapacitySeries]:
    """Returns a window of each recording by class, all of one time that the seed chooses.

    The recordings are of one time: zones come and go with each other, as far as they do.
    """
    spot = [each for each in scenario.classes if each.market == PricedMarket.SPOT]
    if len(paths) > len(spot):
        raise ScenarioError(
            f"{len(paths)} spot files; allowed: up to {len(spot)}, one per spot class of "
            f"{scenario.name}"
        )
    traces = {
        each.name: read_spot_trace(path, each.max_slices)
        for each, path in zip(spot, paths, strict=False)
    }
    common_s = min((each.length_s for each in traces.values()), default=0.0)
    latest_s = max(0.0, common_s - scenario.duration_s)
    start_s = float(np.random.default_rng(seed).uniform(0.0, latest_s)) if latest_s else 0.0
    return {
        name: each.capacity.window(start_s, scenario.duration_s) for name, each in traces.items()
    }


def _class_setup(
    config: ScenarioClass,
    scenario: Scenario,
    usd_per_slice_hour: float,
    seed: int,
    recorded: CapacitySeries | None,
) -> ClassSetup:
    terms = ComputeClass(
        config.name,
        usd_per_slice_hour,
        is_prepaid=config.is_prepaid,
        is_revocable=config.market == PricedMarket.SPOT,
        correlation_group=config.correlation_group,
        min_slices=config.min_slices,
        max_slices=config.max_slices,
        provisioning_s=config.provisioning_s,
        load_s=scenario.profile_of(config).load_s,
        losses_per_hour=config.losses_per_hour,
        patience_s=config.patience_s,
        max_run_s=config.max_run_s,
    )
    capacity = recorded or _capacity(config, scenario.duration_s, seed)
    return ClassSetup(terms, Conditions.as_expected(terms, capacity), config.profile)


def _capacity(config: ScenarioClass, duration_s: float, seed: int) -> CapacitySeries | None:
    match config.capacity:
        case AlwaysCapacity():
            return None
        case StepsCapacity(steps=steps):
            times_s = tuple(step.from_s for step in steps)
            return CapacitySeries(times_s, tuple(step.slices for step in steps))
        case RegimeCapacity(regime=name, seed_offset=offset):
            if name not in REGIMES:
                raise ScenarioError(
                    f"classes.{config.name}.capacity.regime is {name!r}; "
                    f"allowed: {', '.join(REGIMES)}"
                )
            # Seeds of one run lie far from those of the next.
            return generate(REGIMES[name], config.max_slices, 1000 * seed + offset, duration_s)
