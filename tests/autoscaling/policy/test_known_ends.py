"""Slices whose end is known are replaced by when they go, by their own class or by another."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_world import FLEX, ON_DEMAND, RESERVED, TICK_S, World

from autoscaling.records import SliceView
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState

SLOW_FLEX = replace(FLEX, provisioning_s=1200.0, load_s=300.0)
LEAD_S = 1500.0
# A slice whose end was announced takes no requests in its last two minutes.
DRAIN_S = 120.0
RATE = 38.0
NEED = 4


def ends(world: World, name: str, count: int, in_s: float) -> None:
    """So many slices of a class end in a while."""
    of_class = [each for each in world.slices if each.compute_class == name][:count]
    for each in of_class:
        place = world.slices.index(each)
        world.slices[place] = replace(each, expires_at_s=world.now_s + in_s)


def serving(world: World) -> int:
    """The slices that take requests now: those that end soon drain already."""
    return sum(
        each.state == SliceState.READY
        and (each.expires_at_s is None or each.expires_at_s - DRAIN_S > world.now_s)
        for each in world.slices
    )


def run_to_the_end(world: World, for_s: float) -> int:
    """Lets slices drain and be wished for anew as they end; returns the fewest that served."""
    fewest = serving(world)
    for _ in range(round(for_s / TICK_S)):
        world.step(RATE)
        gone = [
            each
            for each in world.slices
            if each.expires_at_s is not None and each.expires_at_s - DRAIN_S <= world.now_s
        ]
        for each in gone:
            # Its replica begins another life, as production's do.
            world.slices.remove(each)
            wish = SliceView(f"{each.slice_id}~2", each.compute_class, SliceState.PROVISIONING,
                             world.now_s, world.now_s)  # fmt: skip
            world.slices.append(wish)
        fewest = min(fewest, serving(world))
    return fewest


def settled(*terms: ComputeClass) -> World:
    world = World.of(*terms)
    world.run(RATE, 2400)
    assert world.ready() == NEED
    return world


def test_slice_that_ends_is_replaced_by_its_class_by_when_it_goes() -> None:
    world = settled(SLOW_FLEX)
    ends(world, "flex-start", 1, LEAD_S + DRAIN_S + 300)
    assert world.run(RATE, 200).targets["flex-start"] == NEED
    plan = world.run(RATE, 100)
    assert plan.targets["flex-start"] == NEED + 1
    asked = [each for past in world.plans[-10:] for each in past.decisions]
    assert [each.delta for each in asked] == [1]
    assert "1 of those held end before that" in asked[0].reason
    assert run_to_the_end(world, 3000) == NEED


def test_slice_that_ends_in_a_full_class_is_replaced_by_the_next_class() -> None:
    full = replace(SLOW_FLEX, max_slices=2)
    world = settled(RESERVED, full, ON_DEMAND)
    ends(world, "flex-start", 1, 600.0)
    plan = world.run(RATE, 600.0 - DRAIN_S - 120.0)
    assert plan.targets == {"reserved": 2, "flex-start": 2, "on-demand": 1}
    asked = [each for past in world.plans for each in past.decisions]
    assert asked[-1].compute_class == "on-demand"
    assert "1 of those held end before that" in asked[-1].reason
    refused = [each.reason for each in plan.refusals]
    assert refused == ["1 end before the class replaces them: others are asked meanwhile"]
    assert run_to_the_end(world, 4000) == NEED
    assert world.targets == {"reserved": 2, "flex-start": 2, "on-demand": 0}, "the bridge goes"


def test_slice_that_ends_in_a_class_that_backs_off_is_replaced_by_another() -> None:
    world = settled(RESERVED, replace(SLOW_FLEX, patience_s=600.0), ON_DEMAND)
    world.dry.add("flex-start")
    ends(world, "flex-start", 1, 3000.0)
    assert run_to_the_end(world, 4000) == NEED
    assert world.targets == {"reserved": 2, "flex-start": 2, "on-demand": 1}
    # Now it backs off, and the other ends.
    ends(world, "flex-start", 1, 3000.0)
    assert run_to_the_end(world, 2800) == NEED
    assert world.targets == {"reserved": 2, "flex-start": 3, "on-demand": 2}
    refused = [each.reason for each in world.plans[-1].refusals]
    assert any(each.startswith("backing off: an order is") for each in refused)
    assert "1 end before the class replaces them: others are asked meanwhile" in refused


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@example([17, 20], 2)
@given(
    st.lists(st.integers(17, 60), min_size=1, max_size=4),
    st.sampled_from([2, 3, 4, 50]),
)
def test_as_many_serve_as_are_needed_whenever_slices_end(ends_in: list[int], quota: int) -> None:
    world = settled(RESERVED, replace(SLOW_FLEX, max_slices=quota), ON_DEMAND)
    of_flex = [each for each in world.slices if each.compute_class == "flex-start"]
    for each, in_100_s in zip(of_flex, ends_in, strict=False):
        place = world.slices.index(each)
        world.slices[place] = replace(each, expires_at_s=world.now_s + 100.0 * in_100_s)
    assert run_to_the_end(world, 7000) == NEED


@pytest.mark.parametrize("state", [SliceState.PROVISIONING, SliceState.DRAINING])
def test_what_is_not_held_needs_no_replacement(state: SliceState) -> None:
    world = settled(SLOW_FLEX)
    before = dict(world.targets)
    world.slices.append(
        SliceView("x", "flex-start", state, world.now_s, world.now_s, 0, world.now_s + 50)
    )
    assert world.step(RATE).targets == before
