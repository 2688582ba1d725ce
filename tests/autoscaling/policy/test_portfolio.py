"""The cheapest mix, against every mix there is."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.policy.mix.portfolio import ClassOption, cheapest_portfolio
from autoscaling.policy.mix.safety import safest_worth_buying


@st.composite
def options(draw: st.DrawFn) -> list[ClassOption]:
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    made = []
    for name in names:
        least, most = sorted(draw(st.tuples(st.integers(0, 1), st.integers(0, 5))))
        price = draw(st.integers(0, 9))
        group = draw(st.sampled_from([None, "x", "y"]))
        made.append(ClassOption(name, float(price), least, most, group))
    return made


def left_after_a_loss(slices: dict[str, int], made: list[ClassOption]) -> int:
    groups = {option.group for option in made if option.group is not None}
    lost = [sum(slices[o.name] for o in made if o.group == group) for group in groups]
    return sum(slices.values()) - max(lost, default=0)


@given(options(), st.integers(0, 9), st.integers(0, 9))
def test_no_mix_that_meets_both_bounds_is_cheaper(
    made: list[ClassOption], total: int, floor: int
) -> None:
    floor = min(floor, total)
    found = cheapest_portfolio(total, floor, made)
    counts = [range(option.at_least, option.at_most + 1) for option in made]
    costs = []
    for chosen in itertools.product(*counts):
        slices = {option.name: count for option, count in zip(made, chosen, strict=True)}
        if sum(chosen) >= total and left_after_a_loss(slices, made) >= floor:
            costs.append(sum(o.usd_per_hour * slices[o.name] for o in made))
    if costs:
        assert (found.missing, found.unsafe) == (0, 0)
        assert found.usd_per_hour == min(costs)
    else:
        assert found.missing or found.unsafe


@given(options(), st.integers(0, 9), st.integers(0, 9))
def test_within_bounds_and_true_of_what_it_says(
    made: list[ClassOption], total: int, floor: int
) -> None:
    found = cheapest_portfolio(total, floor, made)
    for option in made:
        assert option.at_least <= found.slices[option.name] <= option.at_most
    supply = sum(found.slices.values())
    assert found.missing == max(0, total - supply)
    kept = left_after_a_loss(dict(found.slices), made)
    assert found.unsafe == max(0, min(floor, total) - kept)


@given(options(), st.integers(0, 9))
def test_as_many_as_there_are_when_they_do_not_suffice(made: list[ClassOption], floor: int) -> None:
    there_are = sum(option.at_most for option in made)
    found = cheapest_portfolio(there_are + 2, floor, made)
    assert sum(found.slices.values()) == there_are
    assert found.missing == 2


def test_equal_prices_are_taken_in_the_order_given() -> None:
    made = [ClassOption("b", 1.0, 0, 3), ClassOption("a", 1.0, 0, 3)]
    assert cheapest_portfolio(2, 0, made).slices == {"b": 2, "a": 0}


@given(options(), st.integers(0, 7), st.integers(0, 7), st.integers(0, 200))
def test_no_mix_is_cheaper_with_what_its_outages_cost(
    made: list[ClassOption], total: int, floor: int, shortage_usd: int
) -> None:
    made = [
        replace(each, outages_per_hour=0.1 * place, lead_h=0.1) for place, each in enumerate(made)
    ]
    floor = min(floor, total)

    def usd(slices: dict[str, int]) -> float:
        short = 0.0
        for group in {each.group for each in made if each.group}:
            members = [each for each in made if each.group == group]
            lost = sum(slices[each.name] for each in members)
            rate = max(each.outages_per_hour for each in members)
            short += 0.1 * rate * max(0.0, total - (sum(slices.values()) - lost))
        return sum(each.usd_per_hour * slices[each.name] for each in made) + shortage_usd * short

    found = safest_worth_buying(total, floor, float(total), made, float(shortage_usd))
    for chosen in itertools.product(*(range(o.at_least, o.at_most + 1) for o in made)):
        slices = {option.name: count for option, count in zip(made, chosen, strict=True)}
        if sum(chosen) >= total and left_after_a_loss(slices, made) >= floor:
            assert usd(dict(found.slices)) <= usd(slices) + 1e-6


def zones(outages_per_hour: float) -> list[ClassOption]:
    spot = [ClassOption(f"spot-{z}", 4.0, 0, 99, z, outages_per_hour, 0.1) for z in "abc"]
    return [*spot, ClassOption("on-demand", 20.0, 0, 99)]


def test_safety_is_bought_while_it_is_cheaper_than_what_it_prevents() -> None:
    # A slice missed after an outage costs 1000 USD an hour and each zone goes for a tenth of an
    # hour, thrice in a hundred hours: one more slice in one zone saves 3 USD an hour in each of the
    # two others and costs 4.
    worth = safest_worth_buying(12, 0, 12.0, zones(0.03), 1000.0)
    assert sum(worth.slices.values()) == 18
    assert max(worth.slices.values()) == 6


def test_safety_that_costs_more_than_it_prevents_is_not_bought() -> None:
    worth = safest_worth_buying(12, 0, 12.0, zones(0.01), 1000.0)
    assert sum(worth.slices.values()) == 12


def test_what_is_asked_for_is_kept_whatever_it_costs() -> None:
    worth = safest_worth_buying(12, 9, 12.0, zones(0.0), 1000.0)
    assert worth.unsafe == 0
    assert left_after_a_loss(dict(worth.slices), zones(0.0)) >= 9


def test_often_lost_class_gives_way_to_one_a_little_dearer() -> None:
    flex = ClassOption("flex-start", 4.5, 0, 99)
    worth = safest_worth_buying(10, 0, 10.0, [zones(0.5)[0], flex], 1000.0)
    assert worth.slices == {"spot-a": 0, "flex-start": 10}


@st.composite
def shaped_options(draw: st.DrawFn) -> list[ClassOption]:
    """Classes of two shapes, none of which is lost; a large slice carries 2.2 small ones."""
    made = []
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)):
        least, most = sorted(draw(st.tuples(st.integers(0, 1), st.integers(0, 5))))
        price, weight = draw(st.integers(0, 9)), draw(st.sampled_from([1.0, 2.2]))
        made.append(ClassOption(name, float(price), least, most, weight=weight))
    return made


def carried(slices: dict[str, int], made: list[ClassOption]) -> float:
    return sum(each.weight * slices[each.name] for each in made)


def mixes(made: list[ClassOption]) -> list[dict[str, int]]:
    counts = [range(option.at_least, option.at_most + 1) for option in made]
    names = [option.name for option in made]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*counts)]


@given(shaped_options(), st.integers(0, 12))
def test_of_two_shapes_no_mix_that_carries_it_is_cheaper(
    made: list[ClassOption], total: int
) -> None:
    found = cheapest_portfolio(total, 0, made)
    enough = [each for each in mixes(made) if carried(each, made) >= total - 1e-6]
    for option in made:
        assert option.at_least <= found.slices[option.name] <= option.at_most
    if not enough:
        assert found.missing == pytest.approx(
            total - max(carried(each, made) for each in mixes(made))
        )
        return
    assert found.missing == 0
    assert found.usd_per_hour == min(
        sum(o.usd_per_hour * each[o.name] for o in made) for each in enough
    )


@given(shaped_options(), st.integers(0, 12), st.integers(0, 12), st.data())
def test_of_two_shapes_in_groups_it_is_dearer_by_two_slices_at_most(
    made: list[ClassOption], total: int, floor: int, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.sampled_from([None, "x", "y"]), min_size=4, max_size=4))
    made = [replace(each, group=group) for each, group in zip(made, groups, strict=False)]
    floor = min(floor, total)

    def left(slices: dict[str, int]) -> float:
        lost = [
            sum(o.weight * slices[o.name] for o in made if o.group == group)
            for group in {o.group for o in made if o.group is not None}
        ]
        return carried(slices, made) - max(lost, default=0)

    costs = [
        sum(o.usd_per_hour * each[o.name] for o in made)
        for each in mixes(made)
        if carried(each, made) >= total - 1e-6 and left(each) >= floor - 1e-6
    ]
    found = cheapest_portfolio(total, floor, made)
    if costs and not found.missing and not found.unsafe:
        assert found.usd_per_hour <= min(costs) + 2 * max(o.usd_per_hour for o in made)


def test_many_slices_of_three_shapes_are_chosen_from_in_good_time() -> None:
    made = [
        ClassOption(f"{name}-{weight}", price * weight**0.9, 0, 900, weight=weight)
        for name, price in (("spot", 4.0), ("on-demand", 20.0))
        for weight in (1.0, 2.2, 4.7)
    ]
    found = cheapest_portfolio(1000, 0, made)
    assert found.missing == 0
    # 213 of the largest carry 1001.1, and are the cheapest per work.
    assert found.usd_per_hour <= 213 * 4.0 * 4.7**0.9 * 1.01


@given(
    st.lists(st.floats(0.7, 1.1), min_size=3, max_size=3),
    st.sampled_from([(2.2, 4.7), (0.45, 3.1), (1.9, 2.0)]),
    st.integers(30, 90),
)
def test_of_three_shapes_too_many_to_try_all_it_is_dearer_by_one_in_twenty_at_most(
    exponents: list[float], larger: tuple[float, float], total: int
) -> None:
    weights = (1.0, *larger)
    prices = [4.0 * weight**of for weight, of in zip(weights, exponents, strict=True)]
    made = [
        ClassOption(str(weight), price, 0, 400, weight=weight)
        for weight, price in zip(weights, prices, strict=True)
    ]
    lightest = min(range(3), key=lambda place: weights[place])
    first, second = (place for place in range(3) if place != lightest)
    cheapest = math.inf
    for one in range(math.ceil(total / weights[first]) + 1):
        for two in range(math.ceil(total / weights[second]) + 1):
            left = total - one * weights[first] - two * weights[second]
            rest = max(0, math.ceil(left / weights[lightest] - 1e-6))
            usd = one * prices[first] + two * prices[second] + rest * prices[lightest]
            cheapest = min(cheapest, usd)
    found = cheapest_portfolio(total, 0, made)
    assert found.missing == 0
    assert found.usd_per_hour <= 1.05 * cheapest


def test_six_shapes_of_two_zones_are_chosen_from_in_good_time() -> None:
    """All numbers of five shapes with each other would be two hundred million portfolios."""
    made = [
        ClassOption(f"{zone}-{weight}", price * weight**0.9, 0, 300, zone, weight=weight)
        for zone, price in (("a", 4.0), ("b", 4.4), (None, 20.0))
        for weight in (1.0, 2.2, 4.7, 9.8, 12.0, 24.0)
    ]
    found = cheapest_portfolio(300, 75.0, made)
    assert found.missing == found.unsafe == 0
    # As of the largest shape alone, or less.
    of_largest = cheapest_portfolio(300, 75.0, [each for each in made if each.weight == 24.0])
    assert found.usd_per_hour <= of_largest.usd_per_hour


@given(st.integers(1, 12), st.integers(0, 8))
def test_maximum_comes_before_total_and_floor(max_slices: int, beyond: int) -> None:
    made = [
        ClassOption("a", 1.0, 0, 20, "x", weight=1.0),
        ClassOption("b", 1.5, 0, 20, "y", weight=1.0),
        ClassOption("c", 3.0, 0, 2, weight=2.5),
    ]
    for shapes in (made[:2], made):
        found = cheapest_portfolio(max_slices, max_slices, shapes, max_slices)
        assert sum(found.slices.values()) <= max_slices
        demand = float(max_slices + beyond)
        worth = safest_worth_buying(max_slices, 0, demand, shapes, 1e4, max_slices)
        assert sum(worth.slices.values()) <= max_slices


def test_large_slices_of_two_zones_cover_a_need_and_its_floor() -> None:
    """One zone has more than the need leaves it, as a slice cannot be divided."""
    made = [
        ClassOption(f"{name}-{zone}", price, 0, 40, zone, weight=weight)
        for name, price, weight in (("small", 1.0, 1.0), ("large", 2.0, 2.89))
        for zone in "ab"
    ]
    found = cheapest_portfolio(5, 2.5, made)
    assert {name: count for name, count in found.slices.items() if count} == {
        "large-a": 1,
        "large-b": 1,
    }
    assert cheapest_portfolio(9, 4.5, made).usd_per_hour == 8.0
