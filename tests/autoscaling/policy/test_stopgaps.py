"""Slices that a sooner class brings until a slower one of the portfolio delivers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import FLEX, ON_DEMAND, RULES, SPOT, World

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.mix.portfolio import ClassOption
from autoscaling.policy.mix.stopgaps import stopgaps
from autoscaling.records import Fleet, SliceView
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState

# Forty-eight requests per second take five slices.
RATE, NEED = 48.0, 5
SLOW_FLEX = replace(FLEX, provisioning_s=600.0, load_s=60.0)
SLOW_S, SOON_S = 660.0, 120.0


def lost_world(*others: ComputeClass) -> World:
    """All slices were of spot, which has just gone and is dry."""
    world = World.of(SPOT, *others)
    world.run(RATE, 900)
    assert world.targets["spot"] == world.ready() == NEED
    world.lose("spot")
    world.dry.add("spot")
    return world


def test_dearer_class_that_is_sooner_serves_until_the_cheaper_one_delivers() -> None:
    world = lost_world(SLOW_FLEX, ON_DEMAND)

    plan = world.run(RATE, 10)

    assert plan.targets == {"spot": NEED, "flex-start": NEED, "on-demand": NEED}
    (reason,) = [each.reason for each in plan.decisions if each.compute_class == "on-demand"]
    assert "4.8 lack until slower classes deliver in 660 s" in reason
    world.run(RATE, SOON_S)
    assert world.ready("on-demand") == NEED
    fewest = NEED
    for _ in range(120):
        world.step(RATE)
        fewest = min(fewest, world.ready())
    assert fewest == NEED, "they go when the others are ready, and no sooner"
    assert world.targets == {"spot": NEED, "flex-start": NEED, "on-demand": 0}


def test_class_that_is_hardly_sooner_is_not_asked() -> None:
    world = lost_world(replace(FLEX, provisioning_s=100.0), ON_DEMAND)

    assert world.run(RATE, 10).targets == {"spot": NEED, "flex-start": NEED, "on-demand": 0}


def test_as_many_are_asked_as_there_is_room_for_the_cheapest_first() -> None:
    dear = replace(ON_DEMAND, name="dear", usd_per_slice_hour=30.0)
    world = lost_world(SLOW_FLEX, replace(ON_DEMAND, max_slices=2), dear)

    plan = world.run(RATE, 10)

    assert plan.targets == {"spot": NEED, "flex-start": NEED, "on-demand": 2, "dear": NEED - 2}


def test_growth_that_a_slow_class_meets_is_met_soon() -> None:
    world = World.of(SLOW_FLEX, ON_DEMAND, rules=replace(RULES, forecast_share=0.0))
    world.run(RATE, 3600)
    assert world.ready() == world.ready("flex-start") == NEED

    world.run(2 * RATE, SOON_S + 60)

    assert world.ready() >= 2 * NEED - 1
    world.run(2 * RATE, 3600)
    assert world.ready("on-demand") == 0


def test_backing_off_a_class_is_no_stopgap() -> None:
    world = lost_world(SLOW_FLEX, ON_DEMAND)
    world.dry.add("on-demand")
    world.run(RATE, 300)  # its orders are late by now

    history = world.policy._classes["on-demand"]
    assert not history.is_healthy(world.now_s)
    assert "lack until" not in world.plans[-1].arithmetic


# -- by values --

A, B, C = (
    replace(SPOT, name="a", provisioning_s=60.0),
    replace(FLEX, name="b", provisioning_s=500.0),
    replace(ON_DEMAND, name="c", provisioning_s=200.0),
)
NOW_S = 10_000.0


def slices_of(name: str, state: SliceState, count: int, since_s: float) -> list[SliceView]:
    return [
        SliceView(f"{name}-{state.value}-{number}", name, state, since_s, since_s)
        for number in range(count)
    ]


def asked(
    planned: dict[str, int], need: float, slices: list[SliceView], most: int = 50
) -> dict[str, int]:
    classes = {each.name: ClassHistory(each, RULES) for each in (A, B, C)}
    options = [ClassOption(each.name, each.price, 0, most, each.lost_with) for each in (A, B, C)]
    found = stopgaps(NOW_S, Fleet(tuple(slices), {}), classes, options, planned, need)
    return {name: each.count for name, each in found.items()}


PLAN = {"a": 0, "b": 6, "c": 0}


def test_what_is_ready_or_comes_as_soon_is_not_lacking() -> None:
    ready = slices_of("b", SliceState.READY, 2, NOW_S - 3600)
    # Ordered 440 s ago, it is there when one of `a` that is ordered now would be.
    coming = slices_of("b", SliceState.PROVISIONING, 3, NOW_S - 440)

    assert asked(PLAN, 6, ready + coming) == {"a": 1}
    assert asked(PLAN, 5, ready + coming) == {}
    assert asked(PLAN, 6, ready) == {"a": 4}


def test_what_was_asked_stays_asked_while_it_comes_sooner() -> None:
    # Ordered together 300 s ago: `b` comes in 260 s, and `c`, which takes 260 s, in 10 s.
    slow = slices_of("b", SliceState.PROVISIONING, 6, NOW_S - 300)
    sooner = slices_of("c", SliceState.LOADING, 4, NOW_S - 50)

    only_c = {"a": 0, "b": 6, "c": 0}
    assert asked(only_c, 6, slow, most=0) == {}
    # `a`, which takes 120 s, brings what is left.
    assert asked(only_c, 6, [*slow, *sooner]) == {"a": 2, "c": 4}
    # Ready ones too, until the others are as good as there.
    ready = slices_of("c", SliceState.READY, 4, NOW_S - 10)
    assert asked(only_c, 6, [*slow, *ready]) == {"a": 2, "c": 4}
    nearly = slices_of("b", SliceState.PROVISIONING, 6, NOW_S - 505)
    assert asked(only_c, 6, [*nearly, *ready]) == {}


@settings(max_examples=300, deadline=None)
@given(
    planned=st.fixed_dictionaries(
        {"a": st.integers(0, 6), "b": st.integers(0, 6), "c": st.integers(0, 6)}
    ),
    held=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from([SliceState.PROVISIONING, SliceState.LOADING, SliceState.READY]),
            st.integers(0, 600),
        ),
        max_size=12,
    ),
    most=st.integers(6, 12),
)
def test_never_more_than_there_is_room_for_and_none_where_all_deliver_at_once(
    planned: dict[str, int], held: list[tuple[str, SliceState, int]], most: int
) -> None:
    slices = [
        SliceView(f"s{number}", name, state, NOW_S - age, NOW_S - age)
        for number, (name, state, age) in enumerate(held)
    ]
    need = sum(planned.values())
    found = asked(planned, need, slices, most)

    for name, count in found.items():
        assert 0 < count <= most - planned[name]
    # Whoever is the slowest stands in for nobody, but for what there is of it.
    assert "b" not in found or any(each.compute_class == "b" for each in slices)
    if not planned["b"] and not planned["c"]:
        assert found.keys() <= {each.compute_class for each in slices}
    assert asked(planned, 0, slices, most) == {}


@pytest.mark.parametrize("need", [1, 4, 9])
def test_all_that_is_lacking_is_asked_for(need: int) -> None:
    assert asked({"a": 0, "b": need, "c": 0}, need, []) == {"a": need}
