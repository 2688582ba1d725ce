"""What a model may have now: never what others still have, and at once what it must."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_shares import asks, bought, prepaid

from autoscaling.policy.quotas.chip_book import ChipBook
from autoscaling.policy.quotas.records import ChipQuota, ChipShare, Member, SlicesAsked


def book_of(
    num_slices: int,
    asked: Mapping[str, SlicesAsked | None],
    priorities: Mapping[str, int] | None = None,
    fixed: Mapping[str, Mapping[str, int]] | None = None,
) -> ChipBook:
    """A quota of so many reserved slices of four chips."""
    members = [Member(model, 4, (priorities or {}).get(model, 0)) for model in asked]
    quota = ChipQuota("reserved", 4 * num_slices, frozenset(asked))
    return ChipBook([quota], members, asked, fixed or {})


def shares(book: ChipBook, *models: str) -> list[tuple[int, int]]:
    """The most slices of each model and those that it gives up, each taking all it may."""
    found = []
    for model in models:
        share = book.share_of(model)
        found.append((share.most["reserved"], share.given_up.get("reserved", 0)))
        book.take(model, share.most)
    return found


def test_what_nobody_wants_is_for_whoever_comes_first() -> None:
    asked = {"a": asks(2, prepaid()), "b": asks(3, prepaid())}
    assert shares(book_of(8, asked), "a", "b") == [(5, 0), (3, 0)]
    assert sorted(asked, key=book_of(8, asked, {"b": 1}).place_of) == ["b", "a"]
    assert shares(book_of(8, asked, {"b": 1}), "b", "a") == [(6, 0), (2, 0)]


def test_slices_that_others_keep_for_now_are_not_relied_on() -> None:
    """`a` saves more by them. `b` keeps them until it has others in their place."""
    asked = {
        "a": asks(6, prepaid(), bought(90.0)),
        "b": asks(6, prepaid(), bought(20.0), held={"reserved": 6}),
    }
    book = book_of(8, asked)
    assert shares(book, "a", "b") == [(2, 0), (2, 0)]
    assert "16 chips" not in book.share_of("a").words
    assert "32 chips of reserved 2 slices at most are for it now (24 with b)" in (
        book_of(8, asked).share_of("a").words
    )


def test_lower_priority_gives_at_once_to_who_lacks() -> None:
    asked = {"a": asks(6, prepaid()), "b": asks(8, prepaid(), held={"reserved": 8})}
    assert shares(book_of(8, asked, {"a": 1}), "a", "b") == [(6, 0), (2, 6)]


def test_equals_give_at_once_until_both_are_served_as_well() -> None:
    asked = {"a": asks(8, prepaid()), "b": asks(8, prepaid(), held={"reserved": 8})}
    assert shares(book_of(8, asked), "a", "b") == [(4, 0), (4, 4)]
    # Though `b` could buy others, and will: until they are there it keeps its half.
    rich = asks(8, prepaid(), bought(20.0), held={"reserved": 8})
    assert shares(book_of(8, asked | {"b": rich}), "a", "b") == [(4, 0), (0, 4)]


def test_what_is_foreseen_takes_nothing_from_equals_at_once() -> None:
    asked = {
        "a": asks(0, prepaid(), foreseen=8),
        "b": asks(2, prepaid(), foreseen=6, held={"reserved": 8}),
    }
    assert shares(book_of(8, asked), "a", "b") == [(0, 0), (4, 0)]
    assert shares(book_of(8, asked, {"a": 1}), "a", "b") == [(8, 0), (0, 8)]


def test_higher_priority_gives_only_what_it_has_others_for() -> None:
    rich = asks(8, prepaid(), bought(20.0), held={"reserved": 8})
    asked = {"a": asks(6, prepaid()), "b": rich}
    assert shares(book_of(8, asked, {"b": 1}), "b", "a") == [(2, 0), (0, 0)]


def test_nothing_is_given_that_is_too_small_for_who_lacks_it() -> None:
    """Of `b` one may be taken, which is half of what `a` needs; `c` gives nothing at once."""
    asked = {
        "a": asks(1, prepaid()),
        "b": asks(0, prepaid(), held={"reserved": 1}),
        "c": asks(1, prepaid(), bought(20.0), held={"reserved": 1}),
    }
    members = [Member("a", 8, 1), Member("b", 4), Member("c", 4, 2)]
    quota = ChipQuota("reserved", 8, frozenset(asked))
    book = ChipBook([quota], members, asked, {})
    assert [book.share_of(model).given_up for model in "abc"] == [{}, {}, {}]


def test_slices_that_drain_count_as_free_and_as_in_use() -> None:
    leaving = replace(asks(4, prepaid(), held={"reserved": 4}), leaving={"reserved": 4})
    book = book_of(8, {"a": asks(4, prepaid()), "b": leaving})
    share = book.share_of("a")
    assert share == ChipShare({"reserved": 4}, {}, frozenset({"reserved"}), share.words)


def test_model_whose_plan_stands_keeps_what_it_has() -> None:
    asked = {"a": asks(9, prepaid()), "b": None}
    book = book_of(8, asked, fixed={"b": {"reserved": 5}})
    assert book.share_of("b") == ChipShare()
    book.take("b", {"reserved": 5})
    assert shares(book, "a") == [(3, 0)]


def test_model_that_shares_nothing_is_not_bounded() -> None:
    book = ChipBook([], [], {"a": asks(9, prepaid())}, {})
    assert book.share_of("a") == ChipShare()
    book.take("a", {"reserved": 9})


@st.composite
def moments(draw: st.DrawFn) -> tuple[int, dict[str, SlicesAsked], dict[str, int]]:
    asked, priorities = {}, {}
    for model in "abc"[: draw(st.integers(1, 3))]:
        options = [prepaid(draw(st.integers(0, 9)))]
        if draw(st.booleans()):
            options.append(bought(float(draw(st.integers(1, 9))), draw(st.integers(0, 5))))
        held = {"reserved": draw(st.integers(0, 6)), "on-demand": draw(st.integers(0, 3))}
        batches = draw(st.integers(0, 3))
        asked[model] = asks(draw(st.integers(0, 9)), *options, held=held, batches=batches)
        priorities[model] = draw(st.integers(0, 2))
    return draw(st.integers(0, 14)), asked, priorities


@given(moments(), st.data())
def test_whatever_models_plan_chips_are_not_promised_twice(
    moment: tuple[int, dict[str, SlicesAsked], dict[str, int]], data: st.DataObject
) -> None:
    num_slices, asked, priorities = moment
    book = book_of(num_slices, asked, priorities)
    kept_at_first, planned = 0, 0
    for model in sorted(asked, key=book.place_of):
        share = book.share_of(model)
        held = asked[model].held["reserved"]
        goes = share.given_up.get("reserved", 0)
        assert 0 <= goes <= held
        assert share.most["reserved"] >= 0
        # What is there may stay for a while; more than it may have is not planned.
        target = data.draw(st.integers(0, max(share.most["reserved"], held - goes)))
        book.take(model, {"reserved": target})
        kept_at_first += held - goes
        planned += target
    assert planned <= max(num_slices, kept_at_first)


@given(moments())
def test_nobody_gives_up_what_nobody_lacks(
    moment: tuple[int, dict[str, SlicesAsked], dict[str, int]],
) -> None:
    num_slices, asked, priorities = moment
    book = book_of(num_slices, asked, priorities)
    gone = {model: book.share_of(model).given_up.get("reserved", 0) for model in asked}
    lacking = {
        model: asks.whole
        - sum(
            min(each.at_most, asks.held[each.name] if each.name == "reserved" else each.at_most)
            for each in asks.reliable
        )
        for model, asks in asked.items()
    }
    # What is there beyond the quota has to go before another one has a place.
    too_many = max(0, sum(each.held["reserved"] for each in asked.values()) - num_slices)
    for model, count in gone.items():
        others = [max(0, lacking[other]) for other in asked if other != model]
        assert count <= sum(others) + too_many
