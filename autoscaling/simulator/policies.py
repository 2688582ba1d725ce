"""Makes the policies of a run afresh: our production policy and the baselines.

Owns their names and what each is given. Ray is imported only if its policy is requested.
"""

from collections.abc import Callable, Mapping

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.records import Policy
from autoscaling.simulator.baselines.hpa import HorizontalPodAutoscaler
from autoscaling.simulator.baselines.llmd_slo import LlmdSlo
from autoscaling.simulator.baselines.sizing import size
from autoscaling.simulator.baselines.spothedge import SpotHedge
from autoscaling.simulator.baselines.static_on_demand import StaticOnDemand
from autoscaling.simulator.preparation import PreparedRun

SLICEWISE = "slicewise"
STATIC = "static-on-demand"


def _slicewise(run_setup: PreparedRun) -> Policy:
    return SlicewisePolicy(run_setup.scenario.profile, run_setup.terms, run_setup.rules)


def _static(run_setup: PreparedRun) -> Policy:
    return StaticOnDemand(run_setup.terms, run_setup.offered)


def _hpa(run_setup: PreparedRun) -> Policy:
    sizing = size(run_setup.scenario.profile, run_setup.rules.objectives, *run_setup.mean_lengths)
    return HorizontalPodAutoscaler(run_setup.terms, sizing)


def _ray_serve_default(run_setup: PreparedRun) -> Policy:
    # Ray takes seconds to import, and every `slicewise` command loads this module.
    from autoscaling.simulator.baselines.ray_serve_default import RayServeDefault  # noqa: PLC0415

    sizing = size(run_setup.scenario.profile, run_setup.rules.objectives, *run_setup.mean_lengths)
    return RayServeDefault(run_setup.terms, sizing)


def _spothedge(run_setup: PreparedRun) -> Policy:
    sizing = size(run_setup.scenario.profile, run_setup.rules.objectives, *run_setup.mean_lengths)
    return SpotHedge(run_setup.terms, sizing)


def _llmd_slo(run_setup: PreparedRun) -> Policy:
    return LlmdSlo(run_setup.terms, run_setup.scenario.profile, run_setup.rules.objectives)


POLICIES: Mapping[str, Callable[[PreparedRun], Policy]] = {
    SLICEWISE: _slicewise,
    STATIC: _static,
    "hpa": _hpa,
    "ray-serve-default": _ray_serve_default,
    "spothedge": _spothedge,
    "llmd-slo": _llmd_slo,
}
