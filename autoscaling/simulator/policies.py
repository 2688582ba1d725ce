"""Makes the policies of a run afresh: our production policy, the baselines and the oracle.

Owns their names and what each is given. Ray is imported only if its policy is requested.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.records import Policy
from autoscaling.simulator.baselines.hpa import HorizontalPodAutoscaler
from autoscaling.simulator.baselines.llmd_slo import LlmdSlo
from autoscaling.simulator.baselines.sizing import size
from autoscaling.simulator.baselines.spothedge import SpotHedge
from autoscaling.simulator.baselines.static_on_demand import StaticOnDemand
from autoscaling.simulator.oracle import OracleBound, OracleProblem, capacity_range, oracle_cost
from autoscaling.simulator.preparation import PreparedRun

SLICEWISE = "slicewise"
STATIC = "static-on-demand"
ORACLE_INTERVAL_S = 300.0


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


def oracle_of(run_setup: PreparedRun, margin: float = 1.0) -> OracleBound:
    """The floor under every policy of this run, for `margin` times the demand.

    With a margin of 1 the work is carried, but slices have nothing to spare for the bursts within
    a minute: in a simulation such a plan misses objectives.

    Raises:
        OracleError: the solver gave up.
    """
    per_interval = round(ORACLE_INTERVAL_S / run_setup.offered.interval_s)
    minutes = run_setup.offered.slices
    num_intervals = math.ceil(len(minutes) / per_interval)
    padded = np.zeros(num_intervals * per_interval)
    padded[: len(minutes)] = minutes
    # An interval needs what its busiest minute needs.
    demand = padded.reshape(num_intervals, per_interval).max(axis=1)
    demand = np.clip(margin * demand, run_setup.rules.min_slices, run_setup.rules.max_slices)
    capacity = {
        each.terms.name: capacity_range(
            each.conditions.capacity, each.terms.max_slices, num_intervals, ORACLE_INTERVAL_S
        )
        for each in run_setup.classes
    }
    return oracle_cost(
        OracleProblem(
            ORACLE_INTERVAL_S, demand, run_setup.terms, capacity, run_setup.scenario.initial_slices
        )
    )
