"""Prepares the lower bound and the plan with hindsight of a run.

Owns what each of them is told of the run. Does not own the solving (`lower_bound`, `hindsight`).
"""

import math

import numpy as np

from autoscaling.simulator.bounds.hindsight import (
    HindsightPlan,
    HindsightProblem,
    least_slices,
    plan_with_hindsight,
)
from autoscaling.simulator.bounds.lower_bound import (
    Loading,
    lower_bound_usd,
    mean_work,
    most_carried,
    most_slices,
)
from autoscaling.simulator.offered import slices_per_request_per_s
from autoscaling.simulator.preparation import PreparedRun

# The share of requests that are to meet both objectives: what both are held to.
SERVICE_LEVEL = 0.99
HINDSIGHT_INTERVAL_S = 300.0


def lower_bound_of(run_setup: PreparedRun, *, is_loading: bool = False) -> float:
    """The cost in USD below which no policy of this run keeps the service level.

    If `is_loading` counts, slices are paid for while they load, each for the median time; those of
    a run take longer on average.

    Raises:
        LowerBoundError: the classes cannot carry the work.
    """
    objectives, duration_s = run_setup.rules.objectives, run_setup.scenario.duration_s
    requests = run_setup.requests.until(duration_s)
    work = mean_work(
        requests,
        run_setup.scenario.profile,
        objectives=objectives,
        duration_s=duration_s,
        service_level=SERVICE_LEVEL,
    )
    most = {
        each.terms.name: most_slices(
            each.conditions.capacity,
            each.terms.max_slices,
            len(work.due),
            work.interval_s,
            each.conditions.notice_s,
        )
        for each in run_setup.classes
    }
    base = run_setup.scenario.profile
    carries = {
        name: most_carried(requests, base, profile, tpot_s=objectives.tpot_s)
        for name, profile in run_setup.profiles.items()
    }
    loading = None
    if is_loading:
        load_s = {each.terms.name: each.conditions.load_s for each in run_setup.classes}
        loading = Loading(load_s, run_setup.scenario.initial_slices)
    return lower_bound_usd(work, run_setup.terms, most, carries, loading)


def hindsight_of(
    run_setup: PreparedRun, margin: float = 1.0, *, floor_ratio: float = 0.0
) -> HindsightPlan:
    """The plan with hindsight of this run, for `margin` times the demand; see `HindsightProblem`.

    With a margin of 1 the work is carried, but slices have nothing to spare for the bursts within
    a minute: in a simulation such a plan misses objectives.

    Raises:
        HindsightError: the solver gave up.
    """
    per_interval = round(HINDSIGHT_INTERVAL_S / run_setup.offered.interval_s)
    minutes = run_setup.offered.slices
    num_intervals = math.ceil(len(minutes) / per_interval)
    padded = np.zeros(num_intervals * per_interval)
    padded[: len(minutes)] = minutes
    # An interval needs what its busiest minute needs.
    demand = padded.reshape(num_intervals, per_interval).max(axis=1)
    demand = np.clip(margin * demand, run_setup.rules.min_slices, run_setup.rules.max_slices)
    capacity = {
        each.terms.name: least_slices(
            each.conditions.capacity, each.terms.max_slices, num_intervals, HINDSIGHT_INTERVAL_S
        )
        for each in run_setup.classes
    }
    return plan_with_hindsight(
        HindsightProblem(
            HINDSIGHT_INTERVAL_S,
            demand,
            run_setup.terms,
            capacity,
            run_setup.scenario.initial_slices,
            floor_ratio,
            _carried(run_setup),
        )
    )


def _carried(run_setup: PreparedRun) -> dict[str, float]:
    """Returns how many slices' mean work a slice of another shape carries, by class."""
    lengths, tpot_s = run_setup.mean_lengths, run_setup.rules.objectives.tpot_s
    base = slices_per_request_per_s(run_setup.scenario.profile, *lengths, tpot_s)
    return {
        name: base / slices_per_request_per_s(profile, *lengths, tpot_s)
        for name, profile in run_setup.profiles.items()
    }
