"""The plan with hindsight on cases that are solved by hand, and followed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.prices.table import price_table
from autoscaling.records import Fleet, Observation
from autoscaling.simulator.bounds.hindsight import (
    HindsightPlan,
    HindsightPolicy,
    HindsightProblem,
    least_slices,
    plan_with_hindsight,
)
from autoscaling.simulator.bounds.yardsticks import hindsight_of
from autoscaling.simulator.comparison import Yardsticks, cheapest_kept, setup_of
from autoscaling.simulator.preparation import Replacements, prepare_run
from autoscaling.simulator.run import simulate
from autoscaling.simulator.scenario import Scenario, read_scenario
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.compute_class import ComputeClass

HOUR_S = 3600.0


def solve(
    demand: Sequence[float],
    terms: Sequence[ComputeClass],
    capacity: Mapping[str, Sequence[int]] | None = None,
    interval_s: float = HOUR_S,
    *,
    floor_ratio: float = 0.0,
    carries: Mapping[str, float] | None = None,
) -> HindsightPlan:
    given_capacity = capacity or {}
    had = {
        each.name: np.array(given_capacity.get(each.name, [each.max_slices] * len(demand)))
        for each in terms
    }
    problem = HindsightProblem(
        interval_s,
        np.array(demand),
        tuple(terms),
        had,
        floor_ratio=floor_ratio,
        carries=carries or {},
    )
    return plan_with_hindsight(problem)


def on_demand(usd: float = 10.0, **terms: float) -> ComputeClass:
    return ComputeClass("od", usd, load_s=terms.pop("load_s", 0.0), **terms)  # type: ignore[arg-type]


def spot(usd: float = 3.0, load_s: float = 0.0) -> ComputeClass:
    return ComputeClass("spot", usd, is_revocable=True, load_s=load_s)


def test_one_class_follows_the_demand_in_whole_slices() -> None:
    known = solve([1.2, 3.0, 0.0], [on_demand()])

    assert known.ready["od"].tolist() == [2, 3, 0]
    assert known.cost_usd == pytest.approx(50.0)


def test_loading_is_paid_and_makes_it_worth_to_keep_a_slice_over_a_short_lull() -> None:
    # A start costs half an hour's price: two slices stay over one hour without demand only if
    # that hour is cheaper than starting them again, which it is not.
    known = solve([2, 0, 2], [on_demand(load_s=1800.0)])
    assert known.ready["od"].tolist() == [2, 0, 2]
    assert known.cost_usd == pytest.approx(2 * 2 * 10 + 4 * 5)

    # A start that costs two hours' price is not worth it.
    kept = solve([2, 0, 2], [on_demand(load_s=7200.0)])
    assert kept.ready["od"].tolist() == [2, 2, 2]
    assert kept.cost_usd == pytest.approx(3 * 2 * 10 + 2 * 20)


def test_spot_is_taken_while_there_is_any_and_the_rest_on_demand() -> None:
    known = solve([4, 4, 4], [spot(), on_demand()], {"spot": [4, 1, 4]})

    assert known.ready["spot"].tolist() == [4, 1, 4]
    assert known.ready["od"].tolist() == [0, 3, 0]
    assert known.cost_usd == pytest.approx(3 * 9 + 10 * 3)


def test_slices_of_several_shapes_are_worth_what_they_carry() -> None:
    # Five are needed: two that carry two each and one small one, 3 + 3 + 2; three large ones 9.
    large, small = spot(3.0), ComputeClass("small", 2.0, load_s=0.0)
    known = solve([5.0], [large, small], carries={"spot": 2.0})
    assert {name: each.tolist() for name, each in known.ready.items()} == {
        "spot": [2],
        "small": [1],
    }
    assert known.cost_usd == pytest.approx(8.0)


def test_floor_is_left_whichever_group_is_lost() -> None:
    """Of three slices two, in whole ones: half of them."""
    dear = solve([3, 4], [spot(), on_demand()], floor_ratio=0.5)
    assert dear.ready["spot"].tolist() == [1, 2]
    assert dear.ready["od"].tolist() == [2, 2]

    zones = [
        ComputeClass(name, usd, is_revocable=True, load_s=0.0)
        for name, usd in {"spot-a": 3.0, "spot-b": 4.0}.items()
    ]
    spread = solve([4], [*zones, on_demand()], floor_ratio=0.5)
    assert {name: slices.tolist() for name, slices in spread.ready.items()} == {
        "spot-a": [2],
        "spot-b": [2],
        "od": [0],
    }
    of_one_zone = [replace(each, correlation_group="a") for each in zones]
    assert solve([4], [*of_one_zone, on_demand()], floor_ratio=0.5).ready["od"].tolist() == [2]


def test_slice_that_loads_needs_capacity_before_it_is_ready() -> None:
    # Spot comes back in the last hour; loading takes one, so it is of no use any more.
    known = solve([2, 2, 2], [spot(load_s=HOUR_S), on_demand()], {"spot": [0, 0, 2]})

    assert known.ready["spot"].tolist() == [0, 0, 0]
    assert known.cost_usd == pytest.approx(60.0)


def test_prepaid_is_paid_whole_and_used_first() -> None:
    reserved = ComputeClass("reserved", 5.0, is_prepaid=True, max_slices=2, load_s=0.0)
    known = solve([1, 4], [reserved, on_demand()])

    assert known.ready["od"].tolist() == [0, 2]
    assert known.cost_usd == pytest.approx(2 * 2 * 5 + 2 * 10)


def test_demand_that_nobody_can_carry_is_reported_and_not_priced() -> None:
    known = solve([5], [on_demand(max_slices=3)])

    assert known.short_slice_hours == pytest.approx(2.0)
    assert known.cost_usd == pytest.approx(30.0)


def test_being_sent_away_costs_the_loading_again() -> None:
    flex = ComputeClass("flex", 5.0, load_s=360.0, max_run_s=HOUR_S)
    known = solve([1, 1], [flex])

    assert known.cost_usd == pytest.approx(2 * 5 * 1.1 + 0.5)


@settings(max_examples=25, deadline=None)
@given(
    demand=st.lists(st.integers(0, 6), min_size=2, max_size=8),
    capacity=st.lists(st.integers(0, 6), min_size=8, max_size=8),
)
def test_plan_covers_the_demand_within_what_there_is(
    demand: list[int], capacity: list[int]
) -> None:
    had = capacity[: len(demand)]
    known = solve(demand, [spot(load_s=900.0), on_demand(load_s=900.0)], {"spot": had})

    ready = known.ready["spot"] + known.ready["od"]
    assert known.short_slice_hours == pytest.approx(0.0)
    assert (ready >= demand).all()
    assert (known.ready["spot"] <= had).all()


def test_what_is_ready_at_the_start_serves_until_something_cheaper_could_have_come() -> None:
    terms = (spot(load_s=0.0), on_demand())
    had = {each.name: np.full(3, 5) for each in terms}
    problem = HindsightProblem(120.0, np.array([2.0, 2.0, 2.0]), terms, had, {"od": 2})

    known = plan_with_hindsight(problem)

    # Provisioning takes 120 s: one interval.
    assert known.ready["od"].tolist() == [2, 0, 0]
    assert known.ready["spot"].tolist() == [0, 2, 2]
    assert known.short_slice_hours == 0


def test_player_asks_as_long_ahead_as_a_slice_takes_to_be_ready() -> None:
    terms = ComputeClass("od", 10.0, provisioning_s=60.0, load_s=120.0)
    known = HindsightPlan(0.0, {"od": np.array([1, 4, 2])}, 0.0, 300.0)
    policy = HindsightPolicy([terms], known)

    def target(now_s: float) -> int:
        return policy.decide(Observation(now_s, None, Fleet((), {}))).targets["od"]

    assert [target(now_s) for now_s in (0.0, 110.0, 120.0, 599.0, 600.0)] == [1, 1, 4, 4, 2]


def test_least_slices_are_those_of_any_instant_of_an_interval() -> None:
    series = CapacitySeries((0.0, 100.0, 300.0), (5, 2, 9))

    assert least_slices(series, 7, num_intervals=4, interval_s=150.0).tolist() == [2, 2, 7, 7]
    assert least_slices(None, 7, num_intervals=2, interval_s=150.0).tolist() == [7, 7]


def test_plan_that_is_followed_serves_the_requests() -> None:
    whole = read_scenario("spot-drought").model_dump()
    scenario = Scenario.model_validate(whole | {"duration_s": 10_800.0})
    run_setup = prepare_run(scenario, 1, price_table(), Replacements())

    followed = HindsightPolicy(run_setup.terms, hindsight_of(run_setup))
    outcome = simulate(setup_of(run_setup), followed)

    assert outcome.service.served_ratio > 0.999


def test_margin_is_found_however_large_and_between_those_that_are_tried_first() -> None:
    def tried(least: float) -> Callable[[float], Yardsticks | None]:
        return lambda margin: None if margin < least else Yardsticks(1.0, margin, margin, 0.99)

    for least, found in ((0.5, 1.0), (1.17, 1.175), (1.64, 1.65), (2.49, 2.5)):
        best = cheapest_kept(tried(least))
        assert best is not None
        assert best.margin == pytest.approx(found)
    assert cheapest_kept(tried(3.0)) is None
