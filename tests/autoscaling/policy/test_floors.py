"""A floor is kept up to a price: against every mix there is, and in plans."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from policy_world import ANY_PRICE, FLEX, ON_DEMAND, RULES, SPOT, World

from autoscaling.policy.mix.floors import floor_within
from autoscaling.policy.mix.portfolio import ClassOption

ZONES = [replace(SPOT, name=f"spot-{zone}", correlation_group=zone) for zone in "ab"]
HALF = replace(RULES, floor_ratio=0.5, shortage_ratio=0.0)

classes = st.lists(
    st.builds(
        ClassOption,
        st.just("any"),
        st.sampled_from([0.0, 4.0, 5.0, 6.0, 9.0, 20.0]),
        st.just(0),
        st.integers(0, 4),
        st.sampled_from([None, "x", "y", "z"]),
    ),
    max_size=5,
)


def most_left(total: int, made: list[ClassOption]) -> int:
    """What every mix is tried for: so many of the slices are left, at most, if a group is lost.

    Slices that no class of these has are of others, and are not lost.
    """
    best = 0
    for chosen in itertools.product(*(range(each.at_most + 1) for each in made)):
        count = min(total, sum(chosen))
        if sum(chosen) == min(total, sum(each.at_most for each in made)):
            groups = {each.group for each in made if each.group is not None}
            lost = [
                sum(num for num, each in zip(chosen, made, strict=True) if each.group == group)
                for group in groups
            ]
            best = max(best, count - max(lost, default=0) + total - count)
    return best


@given(classes, st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.0, 1.0, 1.5, 3.0, 99.0]))
def test_it_is_what_can_be_left_for_the_price(
    made: list[ClassOption], total: int, floor: int, price_ratio: float
) -> None:
    paid = [each.usd_per_hour for each in made if each.at_most and each.usd_per_hour]
    most_usd = price_ratio * min(paid, default=0.0)
    within = [each for each in made if each.usd_per_hour <= most_usd]
    assert floor_within(price_ratio, total, floor, made) == min(floor, most_left(total, within))


def test_slices_of_another_shape_count_by_what_they_carry() -> None:
    made = [
        ClassOption("small", 4.0, 0, 9, "a"),
        ClassOption("large", 8.0, 0, 9, "b", weight=2.0),
        ClassOption("dear", 9.0, 0, 9),
    ]
    assert floor_within(1.5, 10, 8, made) == 5
    assert floor_within(3.0, 10, 8, made) == 8


def test_floor_is_spread_over_zones_and_not_bought_of_a_dear_class_while_one_is_gone() -> None:
    world = World.of(*ZONES, FLEX, ON_DEMAND, rules=HALF)
    world.run(98.0, 600)
    assert world.targets == {"spot-a": 5, "spot-b": 5, "flex-start": 0, "on-demand": 0}
    world.dry.add("spot-a")
    world.lose("spot-a")
    plan = world.run(98.0, 1800)
    assert world.ready("spot-b") == 10
    assert world.ready("flex-start") + world.ready("on-demand") == 0
    words = "of the floor 0 are kept at any rate, the rest by what it is worth"
    assert words in plan.arithmetic
    world.dry.clear()
    plan = world.run(98.0, 7200)
    assert world.ready("spot-a") == world.ready("spot-b") == 5
    assert words not in plan.arithmetic


def test_floor_without_a_bound_on_its_price_is_kept_by_the_dear_class() -> None:
    world = World.of(*ZONES, FLEX, ON_DEMAND, rules=replace(HALF, floor_price_ratio=ANY_PRICE))
    world.run(98.0, 600)
    world.dry.add("spot-a")
    world.lose("spot-a")
    world.run(98.0, 1800)
    assert world.ready("spot-b") == world.ready("flex-start") == 5


def test_what_is_dear_is_bought_all_the_same_where_outages_cost_more() -> None:
    ready = {}
    for shortage_ratio in (0.0, 5000.0):
        rules = replace(HALF, shortage_ratio=shortage_ratio)
        often = [replace(each, losses_per_hour=0.1) for each in ZONES]
        world = World.of(*often, FLEX, ON_DEMAND, rules=rules)
        world.dry.add("spot-a")
        world.run(98.0, 2400)
        ready[shortage_ratio] = world.ready("flex-start")
    assert ready[0.0] == 0
    assert ready[5000.0] > 0
