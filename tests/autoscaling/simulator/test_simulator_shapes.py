"""A day of a model whose classes have slices of two shapes."""

from dataclasses import replace

import pytest
from simulated_days import OBJECTIVES, class_setup, profile

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import Rules
from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.arrivals import constant_lengths, draw_poisson, stages
from autoscaling.simulator.world.slices import ClassSetup
from serving.domain.slice_lifecycle import SliceState

# Whole hours, request by request.
pytestmark = pytest.mark.slow

SMALL_LAW = profile()
# Twice the chips carry 2.4 times as much within the objective.
LARGE_LAW = profile(
    base_s=0.006, per_sequence_s=0.0002, per_prompt_token_s=0.00002, max_num_seqs=80
)
SMALL = class_setup("small", usd_per_slice_hour=4.0)
LARGE = replace(class_setup("large", usd_per_slice_hour=8.0), profile=LARGE_LAW)


def day(*classes: ClassSetup) -> SimulationOutcome:
    """Twenty minutes that one small slice carries, then forty of twenty times as much."""
    shape = stages((1200.0, 9.0), (2400.0, 200.0))
    own = SMALL_LAW if classes[0] is SMALL else LARGE_LAW
    setup = SimulationSetup(
        draw_poisson(shape, constant_lengths(300, 60), 1),
        own,
        tuple(each if each.profile is not own else replace(each, profile=None) for each in classes),
        OBJECTIVES,
        duration_s=3600.0,
        ready_at_start={classes[0].terms.name: 1},
    )
    policy = SlicewisePolicy(
        own,
        [each.terms for each in setup.classes],
        Rules(OBJECTIVES, drain_delay_s=120.0, floor_ratio=0.0),
        profiles={
            each.terms.name: each.profile for each in setup.classes if each.profile is not None
        },
    )
    return simulate(setup, policy)


def hours(outcome: SimulationOutcome, name: str) -> float:
    return outcome.seconds.get((name, SliceState.READY), 0.0) / 3600


def test_day_with_both_shapes_costs_about_what_the_better_one_does() -> None:
    small, large, either = day(SMALL), day(LARGE), day(SMALL, LARGE)
    assert min(hours(either, "small"), hours(either, "large")) > 0.2
    assert either.cost.total_usd < 0.92 * small.cost.total_usd
    # Small slices that were added one by one are kept until large ones in their place save more.
    assert either.cost.total_usd < 1.15 * large.cost.total_usd
    # The jump to twenty times the load meets one small slice, where it else meets more.
    assert either.service.slo_ratio > small.service.slo_ratio - 0.04
