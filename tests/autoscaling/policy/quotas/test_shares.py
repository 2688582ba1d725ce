"""Who has how many slices of what does not suffice, against every way to share it."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.policy.mix.portfolio import ClassOption
from autoscaling.policy.quotas.records import ChipQuota, Member, SlicesAsked
from autoscaling.policy.quotas.shares import Shared, shares_of


def asks(
    need: int,
    *options: ClassOption,
    held: Mapping[str, int] | None = None,
    batches: int = 0,
    floor: int = 0,
    foreseen: int = 0,
    ideal: tuple[ClassOption, ...] = (),
) -> SlicesAsked:
    return SlicesAsked(
        pressing=need,
        need=need + foreseen,
        whole=need + foreseen + batches,
        floor=floor,
        reliable=options,
        ideal=ideal or options,
        held=held or {},
        leaving={},
    )


def prepaid(most: int = 99, least: int = 0) -> ClassOption:
    return ClassOption("reserved", 0.0, least, most)


def bought(price: float, most: int = 99, name: str = "on-demand") -> ClassOption:
    return ClassOption(name, price, 0, most)


def share(
    chips: Mapping[str, int],
    asked: Mapping[str, SlicesAsked],
    *members: Member,
    fixed: Mapping[str, Mapping[str, int]] | None = None,
) -> Shared:
    models = frozenset(each.model for each in members)
    quotas = [ChipQuota(name, count, models) for name, count in chips.items()]
    return shares_of(quotas, {each.model: each for each in members}, asked, fixed or {})


A, B, C = Member("a", 4), Member("b", 4), Member("c", 4)


def reserved(shared: Shared) -> dict[str, int]:
    return {model: classes["reserved"] for model, classes in shared.shares.items()}


def test_what_suffices_is_not_shared() -> None:
    shared = share({"reserved": 32}, {"a": asks(3, prepaid()), "b": asks(5, prepaid())}, A, B)
    assert (reserved(shared), shared.short) == ({"a": 3, "b": 5}, frozenset())


def test_equals_are_served_equally_well() -> None:
    shared = share({"reserved": 36}, {"a": asks(4, prepaid()), "b": asks(8, prepaid())}, A, B)
    assert reserved(shared) == {"a": 3, "b": 6}
    assert shared.covering == shared.shares


def test_who_comes_first_has_all_and_the_rest_have_what_is_left() -> None:
    asked = {"a": asks(4, prepaid()), "b": asks(8, prepaid()), "c": asks(2, prepaid())}
    first = Member("b", 4, priority=1)
    assert reserved(share({"reserved": 40}, asked, A, first, C)) == {"a": 1, "b": 8, "c": 1}


def test_who_has_nothing_else_goes_before_who_would_only_pay_less() -> None:
    asked = {"a": asks(5, prepaid()), "b": asks(8, prepaid(), bought(20.0))}
    rich = Member("b", 4, priority=5)
    shared = share({"reserved": 32}, asked, A, rich)
    assert reserved(shared) == {"a": 5, "b": 3}
    assert shared.covering["b"]["reserved"] == 0


def test_what_is_left_goes_where_a_chip_saves_most() -> None:
    asked = {"a": asks(4, prepaid(), bought(10.0)), "b": asks(4, prepaid(), bought(30.0))}
    assert reserved(share({"reserved": 20}, asked, A, B)) == {"a": 1, "b": 4}
    # By the chip: a slice of twice as many saves less with each of them.
    large = Member("b", 16)
    assert reserved(share({"reserved": 28}, asked, A, large)) == {"a": 4, "b": 0}


def test_slices_stay_where_they_are_unless_a_move_pays() -> None:
    def shared(price: float) -> dict[str, int]:
        holder = asks(4, prepaid(), bought(20.0), held={"reserved": 4})
        other = asks(4, prepaid(), bought(price))
        return reserved(share({"reserved": 16}, {"a": holder, "b": other}, A, B))

    assert shared(23.0) == {"a": 4, "b": 0}
    assert shared(25.0) == {"a": 0, "b": 4}


def test_batches_come_after_what_is_waited_for() -> None:
    asked = {"a": asks(2, prepaid(), batches=6), "b": asks(4, prepaid())}
    first = Member("a", 4, priority=1)
    assert reserved(share({"reserved": 28}, asked, first, B)) == {"a": 3, "b": 4}


def test_of_equals_work_that_is_there_goes_before_work_that_is_foreseen() -> None:
    asked = {"a": asks(2, prepaid(), foreseen=6), "b": asks(5, prepaid())}
    shared = share({"reserved": 32}, asked, A, B)
    assert reserved(shared) == {"a": 3, "b": 5}
    assert shared.pressing == {"a": {"reserved": 2}, "b": {"reserved": 5}}
    first = Member("a", 4, priority=1)
    assert reserved(share({"reserved": 32}, asked, first, B)) == {"a": 8, "b": 0}


def test_what_models_keep_at_any_load_comes_first_of_all() -> None:
    asked = {"a": asks(1, prepaid(least=1)), "b": asks(8, prepaid())}
    first = Member("b", 4, priority=1)
    assert reserved(share({"reserved": 16}, asked, A, first)) == {"a": 1, "b": 3}


def test_floor_is_worth_more_than_money() -> None:
    """Spot that is lost together would leave nothing; one reserved slice leaves the floor."""
    spot = ClassOption("spot", 1.0, 0, 99, "zone")
    careful = asks(2, prepaid(), spot, floor=1)
    asked = {"a": careful, "b": asks(2, prepaid(), bought(90.0))}
    assert reserved(share({"reserved": 4}, asked, A, B)) == {"a": 1, "b": 0}


def test_who_may_choose_leaves_the_class_on_which_others_depend() -> None:
    either = asks(4, prepaid(), bought(5.0, 99, "spot"))
    asked = {"a": either, "b": asks(4, prepaid())}
    first = Member("a", 4, priority=1)
    shared = share({"reserved": 16, "spot": 16}, asked, first, B)
    assert shared.shares == {"a": {"reserved": 0, "spot": 4}, "b": {"reserved": 4}}


def test_class_that_backs_off_is_replaced_by_one_that_can_be_relied_on() -> None:
    """Spot gives `a` nothing now. It has reserved slices, and is to have spot once that is back."""
    dry, back = bought(5.0, 0, "spot"), bought(5.0, 99, "spot")
    asked = {"a": asks(4, prepaid(), dry, ideal=(prepaid(), back)), "b": asks(4, prepaid())}
    first = Member("a", 4, priority=1)
    shared = share({"reserved": 16, "spot": 8}, asked, first, B)
    assert shared.shares["a"]["reserved"] == 4


def test_what_is_fixed_is_taken_off() -> None:
    asked = {"a": asks(9, prepaid())}
    fixed = {"b": {"reserved": 5}}
    shared = share({"reserved": 32}, asked, A, B, fixed=fixed)
    assert shared.shares == {"a": {"reserved": 3}}
    # More than the quota, because somebody pinned it: there is nothing left, and no less.
    fixed = {"b": {"reserved": 50}}
    assert share({"reserved": 32}, asked, A, B, fixed=fixed).shares == {"a": {"reserved": 0}}


def test_pinned_class_covers_its_own_model() -> None:
    asked = {"a": asks(4, prepaid(), bought(1.0, name="spot")), "b": asks(9, prepaid())}
    fixed = {"a": {"spot": 3}}
    shared = share({"reserved": 32}, asked, A, B, fixed=fixed)
    assert shared.shares["a"] == {"reserved": 1}


@st.composite
def contests(draw: st.DrawFn) -> tuple[int, dict[str, SlicesAsked], list[Member]]:
    """Up to three models with slices of one size, of which each could buy others elsewhere."""
    asked, members = {}, []
    for model in "abc"[: draw(st.integers(2, 3))]:
        options = [prepaid(draw(st.integers(0, 6)))]
        for place in range(draw(st.integers(0, 2))):
            price, most = draw(st.integers(1, 9)), draw(st.integers(0, 4))
            options.append(bought(float(price), most, f"other-{place}"))
        asked[model] = asks(draw(st.integers(0, 7)), *options)
        members.append(Member(model, 4, draw(st.integers(0, 1))))
    return draw(st.integers(0, 9)), asked, members


def outcome(
    split: Mapping[str, int], asked: Mapping[str, SlicesAsked], members: list[Member]
) -> tuple[list[int], float]:
    """Slices that lack, the model of highest priority first, and what all cost."""
    lacking: dict[int, int] = {}
    cost = 0.0
    for each in members:
        asks = asked[each.model]
        open_slices = max(0, asks.need - split[each.model])
        for option in sorted(asks.reliable[1:], key=lambda option: option.usd_per_hour):
            taken = min(open_slices, option.at_most)
            open_slices -= taken
            cost += taken * option.usd_per_hour
        lacking[-each.priority] = lacking.get(-each.priority, 0) + open_slices
    return [count for _, count in sorted(lacking.items())], cost


@given(contests())
def test_no_other_way_to_share_lacks_less_or_costs_less(
    contest: tuple[int, dict[str, SlicesAsked], list[Member]],
) -> None:
    num_slices, asked, members = contest
    shared = reserved(share({"reserved": 4 * num_slices}, asked, *members))
    most = [min(asked[each.model].reliable[0].at_most, num_slices) for each in members]
    splits = [
        dict(zip(asked, chosen, strict=True))
        for chosen in itertools.product(*(range(each + 1) for each in most))
        if sum(chosen) <= num_slices
    ]
    lacking, cost = outcome(shared, asked, members)
    outcomes = [outcome(split, asked, members) for split in splits]
    assert lacking == min(each for each, _ in outcomes)
    if not any(lacking):
        assert cost == pytest.approx(min(usd for each, usd in outcomes if each == lacking))


@given(contests())
def test_no_chip_is_given_twice(
    contest: tuple[int, dict[str, SlicesAsked], list[Member]],
) -> None:
    num_slices, asked, members = contest
    shared = reserved(share({"reserved": 4 * num_slices}, asked, *members))
    assert sum(shared.values()) <= num_slices
    for model, count in shared.items():
        assert 0 <= count <= asked[model].reliable[0].at_most
