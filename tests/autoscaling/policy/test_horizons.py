"""How far ahead each class is asked: as long as it takes to deliver, not as the cheapest takes."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from policy_world import ANY_PRICE, FLEX, PROFILE, RESERVED, RULES, SPOT, World, load

from autoscaling.policy.mix.horizons import Horizon, asked_ahead
from autoscaling.policy.mix.portfolio import Portfolio
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.records import Fleet, Observation, SliceView
from serving.domain.slice_lifecycle import SliceState

SLOW_FLEX = replace(FLEX, provisioning_s=1200.0, load_s=300.0)
QUIET = replace(RULES, forecast_share=0.0)
DAY_S = 86_400.0
TWO_HOURS_S = 7200.0


def swell(at_s: float) -> float:
    """The rate at a time: three to five slices' work, up and down every two hours."""
    return 39.0 + 15.0 * math.sin(2 * math.pi * at_s / TWO_HOURS_S)


def test_full_reserved_leaves_the_horizon_to_flex_start() -> None:
    world = World.of(RESERVED, SLOW_FLEX, rules=QUIET)
    world.run(19.0, 900)
    assert world.targets == {"reserved": 2, "flex-start": 0}
    rate = 19.0
    while not world.targets["flex-start"]:
        rate += 0.05
        plan = world.step(rate)
    assert rate < 20.0, "before the second slice is full"
    assert "flex-start: 1 of its slices for the need of 3 in 1500 s" in plan.arithmetic
    assert [each.compute_class for each in plan.decisions] == ["flex-start"]
    assert "1 of its slices for the need of 3 in 1500 s" in plan.decisions[0].reason
    assert plan.demand_slices == 2, "the need before that is as it was"


def test_class_is_asked_for_what_the_season_brings_by_when_it_delivers() -> None:
    policy = SlicewisePolicy(PROFILE, [RESERVED, SLOW_FLEX], QUIET)
    reserved = [SliceView(f"r-{n}", "reserved", SliceState.READY, 0.0, 0.0) for n in range(2)]
    short = 0
    for tick in range(round((DAY_S + 2 * TWO_HOURS_S) / 30)):
        now_s = 30.0 * tick
        fleet = Fleet(tuple(reserved), {"reserved": 2, "flex-start": 0})
        plan = policy.decide(Observation(now_s, load(swell(now_s), now_s), fleet))
        if now_s > DAY_S + TWO_HOURS_S:
            # Half a slice is for the errors of the forecast.
            needed = swell(now_s + 1500.0) / 10 - 0.5
            short += sum(plan.targets.values()) < needed
    assert short == 0


def test_what_the_soonest_class_can_bring_later_is_not_asked_of_a_slower_one() -> None:
    # The cheaper class is the sooner one: what is needed after it can be asked of it by then.
    world = World.of(SPOT, SLOW_FLEX, rules=QUIET)
    world.run(19.0, 900)
    for tick in range(60):
        plan = world.step(19.0 + 0.2 * tick)
        assert plan.targets["flex-start"] == 0


def test_slower_class_that_the_floor_needs_is_asked_ahead() -> None:
    world = World.of(
        SPOT, SLOW_FLEX, rules=replace(QUIET, floor_ratio=0.5, floor_price_ratio=ANY_PRICE)
    )
    world.run(36.0, 2400)
    assert world.targets == {"spot": 2, "flex-start": 2}
    rate = 36.0
    while world.targets["flex-start"] == 2:
        rate += 0.05
        plan = world.step(rate)
    assert (plan.targets, plan.demand_slices) == ({"spot": 2, "flex-start": 3}, 4)


NAMES = ("a", "b", "c")
portfolios = st.builds(
    lambda counts: Portfolio(dict(zip(NAMES, counts, strict=True)), 0.0),
    st.tuples(*(st.integers(0, 9) for _ in NAMES)),
)
horizons = st.lists(
    st.builds(Horizon, st.sampled_from(NAMES), st.floats(1, 9999), st.integers(0, 27), portfolios),
    max_size=3,
    unique_by=lambda each: each.compute_class,
)


@given(portfolios, horizons)
def test_nothing_is_asked_beyond_the_portfolios(base: Portfolio, later: list[Horizon]) -> None:
    ahead = asked_ahead(base, later)
    sizes = [sum(each.slices.values()) for each in (base, *(one.portfolio for one in later))]
    asked = {name: ahead[name].count for name in ahead}
    assert all(count > 0 for count in asked.values())
    assert sum(base.slices.values()) + sum(asked.values()) <= max(sizes)
    parts = {one.compute_class: one.portfolio.slices[one.compute_class] for one in later}
    assert all(base.slices[name] + count <= parts[name] for name, count in asked.items())


@given(portfolios, st.integers(0, 9), st.integers(0, 9))
def test_class_gets_its_part_of_the_portfolio_of_its_own_time(
    base: Portfolio, more_soon: int, more_late: int
) -> None:
    grown = {**base.slices, "a": base.slices["a"] + more_soon, "c": base.slices["c"] + more_late}
    ahead = asked_ahead(base, [Horizon("c", 1500.0, 9, Portfolio(grown, 0.0))])
    assert ("c" in ahead) == (more_late > 0)
    if more_late:
        assert (ahead["c"].count, ahead["c"].lead_s) == (more_late, 1500.0)
