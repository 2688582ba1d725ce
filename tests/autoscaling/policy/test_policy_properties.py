"""What holds for every plan, whatever the load, the losses and the past."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import ALL, ANY_PRICE, ON_DEMAND, PROFILE, RESERVED, RULES, SPOT, World, load

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.records import Fleet, Observation
from autoscaling.replay import observation_of_json, observation_to_json, plan_to_json

BOUNDED = replace(RULES, min_slices=1, max_slices=12, floor_ratio=0.4, floor_price_ratio=ANY_PRICE)
rates = st.floats(0, 150, allow_nan=False)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[float, int, str | None, str | None]]:
    """Loads one after the other: rate, for how many ticks, what is lost, what is dry meanwhile."""
    names = st.sampled_from(["spot", "flex-start", "on-demand"])
    chapter = st.tuples(rates, st.integers(1, 25), st.none() | names, st.none() | names)
    return draw(st.lists(chapter, min_size=1, max_size=6))


def told(story: list[tuple[float, int, str | None, str | None]], world: World) -> World:
    for rate, ticks, lost, dry in story:
        world.dry = {dry} if dry else set()
        if lost:
            world.lose(lost)
        for _ in range(ticks):
            world.step(rate)
    assert world.plans
    return world


@settings(max_examples=25, deadline=None)
@given(stories())
def test_within_bounds_and_quota(story: list[tuple[float, int, str | None, str | None]]) -> None:
    world = told(story, World.of(rules=BOUNDED))
    quota = {each.name: each.max_slices for each in ALL}
    for plan in world.plans:
        assert set(plan.targets) == set(quota)
        assert all(0 <= count <= quota[name] for name, count in plan.targets.items())
        assert plan.demand_slices is not None
        assert 1 <= plan.demand_slices <= 12


@settings(max_examples=25, deadline=None)
@given(stories())
def test_plan_is_a_function_of_its_inputs(
    story: list[tuple[float, int, str | None, str | None]],
) -> None:
    first = told(story, World.of(rules=BOUNDED))
    second = told(story, World.of(rules=BOUNDED))
    assert first.plans == second.plans


@settings(max_examples=25, deadline=None)
@given(stories(), st.randoms(use_true_random=False))
def test_order_of_slices_and_losses_changes_nothing(story, chance) -> None:  # type: ignore[no-untyped-def]
    world = told(story, World.of(rules=BOUNDED))
    twin = told(story, World.of(rules=BOUNDED))
    shuffled = list(world.slices)
    chance.shuffle(shuffled)
    now_s = world.now_s + 10
    plans = [
        each.policy.decide(
            Observation(now_s, load(40.0, now_s), Fleet(tuple(slices), dict(each.targets)))
        )
        for each, slices in ((world, world.slices), (twin, shuffled))
    ]
    assert plans[0] == plans[1]


@settings(max_examples=25, deadline=None)
@given(st.lists(rates, min_size=2, max_size=12))
def test_more_load_never_takes_fewer_slices(loads: list[float]) -> None:
    needs = []
    for rate in sorted(loads):
        world = World.of()
        needs.append(world.run(rate, 200).demand_slices)
    assert needs == sorted(needs)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(stories(), st.floats(0.5, 150))
def test_settles_under_constant_load(
    story: list[tuple[float, int, str | None, str | None]], rate: float
) -> None:
    world = told(story, World.of(rules=BOUNDED))
    world.dry = set()
    # The errors of the story are remembered for two hours, and are a margin that long.
    world.run(rate, 9000)
    settled = dict(world.targets)
    for _ in range(60):
        assert world.step(rate).targets == settled


@settings(max_examples=25, deadline=None)
@given(stories())
def test_floor_stands_on_slices_that_are_not_lost_together(
    story: list[tuple[float, int, str | None, str | None]],
) -> None:
    world = told(story, World.of(rules=BOUNDED))
    for plan in world.plans:
        kept = sum(count for name, count in plan.targets.items() if name != SPOT.name)
        assert plan.demand_slices is not None
        assert kept >= 0.4 * plan.demand_slices - 1e-9


@settings(max_examples=25, deadline=None)
@given(rates.filter(lambda rate: rate > 25), st.integers(30, 60))
def test_loss_of_all_spot_is_answered_within_one_decision(rate: float, ticks: int) -> None:
    world = World.of(RESERVED, SPOT, ON_DEMAND)
    for _ in range(ticks):
        world.step(rate)
    lost = world.targets["spot"]
    world.dry.add("spot")
    world.lose("spot")
    plan = world.step(rate)
    assert plan.targets["on-demand"] >= lost


@settings(max_examples=25, deadline=None)
@given(stories())
def test_every_change_and_every_refusal_has_a_reason(
    story: list[tuple[float, int, str | None, str | None]],
) -> None:
    world = told(story, World.of(rules=BOUNDED))
    targets = dict.fromkeys(world.targets, 0)
    for plan in world.plans:
        assert all(each.reason for each in (*plan.decisions, *plan.refusals))
        changes = {each.compute_class: 0 for each in plan.decisions}
        for each in plan.decisions:
            changes[each.compute_class] += each.delta
        moved = {name: count - targets[name] for name, count in plan.targets.items()}
        assert {name: delta for name, delta in moved.items() if delta} == {
            name: delta for name, delta in changes.items() if delta
        }
        targets = dict(plan.targets)


@settings(max_examples=12, deadline=None)
@given(stories())
def test_log_of_observations_gives_the_same_plans_again(
    story: list[tuple[float, int, str | None, str | None]],
) -> None:
    world = World.of(rules=BOUNDED)
    observed: list[Observation] = []
    decide = world.policy.decide

    class Recording:
        """The same policy, with what it saw written down."""

        name = "slicewise"

        def decide(self, observation: Observation):  # type: ignore[no-untyped-def]
            observed.append(observation)
            return decide(observation)

    world.policy = Recording()  # type: ignore[assignment]
    told(story, world)
    again = SlicewisePolicy(PROFILE, ALL, BOUNDED)
    for observation, plan in zip(observed, world.plans, strict=True):
        read = observation_of_json(observation_to_json(observation))
        assert plan_to_json(again.decide(read)) == plan_to_json(plan)
