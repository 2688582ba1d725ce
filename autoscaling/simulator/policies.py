"""Makes the policies of a run afresh: our production policy and the baselines.

Owns their names, what each is given, and the one knob with which each trades cost for service. Ray
is imported only if its policy is requested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import LATE_RATIO
from autoscaling.records import Policy
from autoscaling.simulator.baselines.dynamo_planner import DynamoPlanner
from autoscaling.simulator.baselines.hpa import HorizontalPodAutoscaler
from autoscaling.simulator.baselines.ladder import ClassLadder
from autoscaling.simulator.baselines.layout import BaselineLayout
from autoscaling.simulator.baselines.llmd_slo import UP_THRESHOLD, LlmdSlo
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from autoscaling.simulator.baselines.sizing import HEADROOM, Sizing, size
from autoscaling.simulator.baselines.spothedge import (
    AUTHORS_SETTINGS,
    QUICK_SETTINGS,
    HedgeSettings,
    SpotHedge,
)
from autoscaling.simulator.baselines.static_on_demand import StaticOnDemand
from autoscaling.simulator.preparation import PreparedRun
from autoscaling.simulator.scenario import ScenarioError

SLICEWISE = "slicewise"
STATIC = "static-on-demand"
# Policies that know of slices of several shapes.
CHOOSE_SHAPES = (SLICEWISE,)


@dataclass(frozen=True, slots=True)
class Knob:
    """The setting that trades cost for service: its name, values to try, and the shipped one."""

    name: str
    values: tuple[float, ...]
    shipped: float

    def shown(self, value: float) -> float | None:
        """Returns the value as runs are named by it: `None` for the shipped one."""
        return None if value == self.shipped else value


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """The policy as it takes part: `make` gets the run and the value of its knob."""

    make: Callable[[PreparedRun, float], Policy]
    knob: Knob


def make_policy(run_setup: PreparedRun, name: str, value: float | None = None) -> Policy:
    """The policy of that name, of `POLICIES`; its knob at `value`, `None`: as shipped.

    Raises:
        ScenarioError: it counts slices of one shape, and the run has several.
    """
    if run_setup.scenario.has_shapes and name not in CHOOSE_SHAPES:
        raise ScenarioError(
            f"policy is {name}, which knows slices of one shape, and classes of "
            f"{run_setup.scenario.name} have profiles of their own; allowed: "
            f"{', '.join(CHOOSE_SHAPES)}"
        )
    compared = POLICIES[name]
    return compared.make(run_setup, compared.knob.shipped if value is None else value)


def _slicewise(run_setup: PreparedRun, late_ratio: float) -> Policy:
    rules = replace(run_setup.rules, late_ratio=late_ratio)
    return SlicewisePolicy(
        run_setup.scenario.profile, run_setup.terms, rules, profiles=run_setup.profiles
    )


def _static(run_setup: PreparedRun, headroom: float) -> Policy:
    return StaticOnDemand(run_setup.terms, run_setup.offered, headroom)


def _hpa(layout: Callable[[PreparedRun], BaselineLayout]) -> Callable[[PreparedRun, float], Policy]:
    return lambda run_setup, headroom: HorizontalPodAutoscaler(
        layout(run_setup), _sizing(run_setup, headroom)
    )


def _llmd(
    layout: Callable[[PreparedRun], BaselineLayout],
) -> Callable[[PreparedRun, float], Policy]:
    return lambda run_setup, up_threshold: LlmdSlo(
        layout(run_setup), run_setup.scenario.profile, run_setup.rules.objectives, up_threshold
    )


def _dynamo(
    layout: Callable[[PreparedRun], BaselineLayout],
) -> Callable[[PreparedRun, float], Policy]:
    return lambda run_setup, share: DynamoPlanner(
        layout(run_setup), run_setup.scenario.profile, run_setup.rules.objectives, share
    )


def _ray_serve_default(run_setup: PreparedRun, headroom: float) -> Policy:
    # Ray takes seconds to import, and every `slicewise` command loads this module.
    from autoscaling.simulator.baselines.ray_serve_default import RayServeDefault  # noqa: PLC0415

    return RayServeDefault(_on_demand(run_setup), _sizing(run_setup, headroom))


def _spothedge(settings: HedgeSettings) -> Callable[[PreparedRun, float], Policy]:
    return lambda run_setup, headroom: SpotHedge(
        run_setup.terms, _sizing(run_setup, headroom), settings
    )


def _sizing(run_setup: PreparedRun, headroom: float) -> Sizing:
    profile, objectives = run_setup.scenario.profile, run_setup.rules.objectives
    return size(profile, objectives, *run_setup.mean_lengths, headroom)


def _on_demand(run_setup: PreparedRun) -> BaselineLayout:
    return SingleClassLayout.of(run_setup.terms)


def _ladder(run_setup: PreparedRun) -> BaselineLayout:
    return ClassLadder(run_setup.terms, migrates=True)


def _ladder_without_return(run_setup: PreparedRun) -> BaselineLayout:
    return ClassLadder(run_setup.terms, migrates=False)


# So many values that levels of 99 and 99.5 % lie between two of them that are close.
_HEADROOM = Knob("headroom", (0.5, 0.57, 0.65, 0.72, 0.8, 0.9), HEADROOM)
_LLMD = Knob("up_threshold", (0.35, 0.45, 0.55, 0.65, 0.75, 0.85), UP_THRESHOLD)
_DYNAMO = Knob("objective_share", (0.4, 0.45, 0.5, 0.6, 0.8, 1.0), 1.0)

POLICIES: Mapping[str, ComparedPolicy] = {
    SLICEWISE: ComparedPolicy(
        _slicewise, Knob("late_ratio", (0.0005, 0.001, 0.002, 0.004, 0.008), LATE_RATIO)
    ),
    STATIC: ComparedPolicy(_static, _HEADROOM),
    "hpa": ComparedPolicy(_hpa(_on_demand), _HEADROOM),
    "hpa-ladder": ComparedPolicy(_hpa(_ladder), _HEADROOM),
    "hpa-ladder-no-return": ComparedPolicy(_hpa(_ladder_without_return), _HEADROOM),
    "llmd-slo": ComparedPolicy(_llmd(_on_demand), _LLMD),
    "llmd-slo-ladder": ComparedPolicy(_llmd(_ladder), _LLMD),
    "dynamo-planner": ComparedPolicy(_dynamo(_on_demand), _DYNAMO),
    "dynamo-planner-ladder": ComparedPolicy(_dynamo(_ladder), _DYNAMO),
    "ray-serve-default": ComparedPolicy(_ray_serve_default, _HEADROOM),
    "spothedge": ComparedPolicy(_spothedge(AUTHORS_SETTINGS), _HEADROOM),
    "spothedge-quick": ComparedPolicy(_spothedge(QUICK_SETTINGS), _HEADROOM),
}
