"""The operator's question: which classes, how many slices, what it costs, and what without spot.

Owns the two simulations of our policy that answer it, one as the scenario has it and one with every
spot class out of stock, and the sums for a month and a million tokens. Does not own their display.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autoscaling.simulator.comparison import simulate_policy
from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.policies import SLICEWISE
from autoscaling.simulator.preparation import PreparedRun, UsedPrice
from autoscaling.simulator.scenario import Scenario, ScenarioError
from autoscaling.simulator.world.slices import ClassSetup
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile, read_profile
from serving.domain.slice_lifecycle import HELD_STATES

HOURS_PER_MONTH = 730.0
_TOKENS = 1_000_000
# By their names on the command line.
_OBJECTIVES = {
    "ttft": "ttft_s",
    "ttft_per_prompt_token": "ttft_per_prompt_token_s",
    "tpot": "tpot_s",
}


@dataclass(frozen=True, slots=True)
class ClassHours:
    """The contribution of one class: slices held, over time, and dollars per month of such days."""

    compute_class: str
    mean_slices: float
    peak_slices: int
    usd_per_month: float


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The result of one simulated run. Its tokens are those in and out that were served."""

    name: str
    uses: tuple[ClassHours, ...]
    usd_per_month: float
    usd_per_million_tokens: float
    served_ratio: float
    slo_ratio: float


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The answer, with what it was answered for."""

    profile: CapacityProfile
    objectives: Objectives
    mean_requests_per_s: float
    peak_demand_slices: int
    operating_points: tuple[OperatingPoint, ...]
    prices: tuple[UsedPrice, ...]


def planned_scenario(
    scenario: Scenario, profile: Path | None, slo: str | None, rate: float | None
) -> Scenario:
    """Returns `scenario` with the given values in place of its own.

    Raises:
        ScenarioError: `slo` is not of the form, or the result is inconsistent.
        ProfileError: the profile cannot be read.
    """
    raw = scenario.model_dump()
    if profile is not None:
        raw["profile"] = read_profile(profile).model_dump()
    if slo is not None:
        raw["objectives"] = _objectives(slo)
    if rate is not None:
        raw["load"] = _load_at(scenario, rate)
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise ScenarioError(first["msg"]) from error


def make_plan(run_setup: PreparedRun) -> CapacityPlan:
    """Simulates our policy, and once more without spot if there is any, and sums up."""
    operating_points = [
        _operating_point("as the scenario has it", run_setup, simulate_policy(run_setup, SLICEWISE))
    ]
    if any(each.terms.is_revocable for each in run_setup.classes):
        without_spot = replace(
            run_setup, classes=tuple(_without_capacity(each) for each in run_setup.classes)
        )
        operating_points.append(
            _operating_point(
                "without any spot", without_spot, simulate_policy(without_spot, SLICEWISE)
            )
        )
    return CapacityPlan(
        profile=run_setup.scenario.profile,
        objectives=run_setup.rules.objectives,
        mean_requests_per_s=len(run_setup.requests) / run_setup.scenario.duration_s,
        peak_demand_slices=run_setup.offered.peak_slices,
        operating_points=tuple(operating_points),
        prices=run_setup.prices,
    )


def plan_json(plan: CapacityPlan) -> dict[str, Any]:
    """The plan for machines."""
    return {
        "model": plan.profile.model,
        "profile_source": plan.profile.source,
        "objectives": asdict(plan.objectives),
        "mean_requests_per_s": plan.mean_requests_per_s,
        "peak_demand_slices": plan.peak_demand_slices,
        "situations": [_situation_json(each) for each in plan.operating_points],
    }


def _situation_json(point: OperatingPoint) -> dict[str, Any]:
    fields = asdict(point)
    uses = fields.pop("uses")
    fields["classes"] = {use.pop("compute_class"): use for use in uses}
    return fields


def _objectives(slo: str) -> dict[str, float]:
    given = dict(each.partition("=")[::2] for each in slo.split(","))
    try:
        if not {"ttft", "tpot"} <= given.keys() <= _OBJECTIVES.keys():
            raise ValueError
        return {_OBJECTIVES[name]: float(seconds) for name, seconds in given.items()}
    except ValueError as error:
        raise ScenarioError(
            f"slo is {slo!r}; allowed: as ttft=2,tpot=0.1 or, by the length of prompts,"
            " ttft=2,ttft_per_prompt_token=0.0001,tpot=0.1, in seconds"
        ) from error


def _load_at(scenario: Scenario, rate: float) -> dict[str, Any]:
    if scenario.load.kind != "day":
        raise ScenarioError(
            f"rate is {rate:g}; allowed only where {scenario.name} has a day's load"
        )
    return {"kind": "day", "trace": scenario.load.trace, "mean_requests_per_s": rate}


def _without_capacity(setup: ClassSetup) -> ClassSetup:
    if not setup.terms.is_revocable:
        return setup
    conditions = replace(setup.conditions, capacity=CapacitySeries.constant(0))
    return ClassSetup(setup.terms, conditions)


def _operating_point(
    name: str, run_setup: PreparedRun, outcome: SimulationOutcome
) -> OperatingPoint:
    hours = outcome.timeline.end_s / 3600
    uses = []
    for terms in run_setup.terms:
        held = [
            counts
            for (compute_class, state), counts in outcome.timeline.slices.items()
            if compute_class == terms.name and state in HELD_STATES
        ]
        held_s = sum(outcome.seconds.get((terms.name, state), 0.0) for state in HELD_STATES)
        uses.append(
            ClassHours(
                terms.name,
                held_s / outcome.timeline.end_s,
                int(sum(held).max()) if held else 0,  # type: ignore[union-attr]
                outcome.cost.usd_by_class[terms.name] / hours * HOURS_PER_MONTH,
            )
        )
    tokens = outcome.requests.input_tokens.sum() + outcome.requests.output_tokens.sum()
    served_tokens = float(tokens) * outcome.service.served_ratio
    return OperatingPoint(
        name,
        tuple(uses),
        outcome.cost.total_usd / hours * HOURS_PER_MONTH,
        outcome.cost.total_usd / served_tokens * _TOKENS if served_tokens else 0.0,
        outcome.service.served_ratio,
        outcome.service.slo_ratio,
    )
