"""Which engine a request goes to, and the reason that is given."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.dispatch.known_room import Need
from serving.gateway.telemetry.request_story import Because

from .plain_choice import Engine, chosen, plainly

# Few values each, so that many are equal.
engines = st.builds(
    Engine,
    engine_id=st.text("abcdef", min_size=1, max_size=3),
    num_in_flight=st.integers(0, 3),
    num_dispatched=st.integers(0, 3),
    is_draining=st.booleans(),
    is_leaving=st.booleans(),
    has_isolated=st.booleans(),
    backlog_tokens=st.sampled_from([0, 63, 64, 500, 9000]),
    kv_tokens=st.sampled_from([0, 100, 1000, 1 << 60]),
    computed_ratio=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
    has_place=st.booleans(),
    has_place_for_moved=st.booleans(),
    is_empty=st.booleans(),
    is_kept=st.booleans(),
    has_full_line=st.booleans(),
    is_late=st.booleans(),
    num_cached=st.sampled_from([None, 0, 128, 896, 1000]),
)
fleets = st.lists(engines, max_size=14, unique_by=lambda engine: engine.engine_id)
needs = st.builds(
    Need, num_tokens=st.sampled_from([1, 5, 130, 1000, 20_000]), num_expected=st.integers(0, 200)
)


def test_request_goes_where_the_fewest_are_in_flight() -> None:
    route = chosen([Engine("a", 3, 0), Engine("b", 1, 9)])
    assert (route.engine_id, route.because) == ("b", Because.FEWEST_IN_FLIGHT)


def test_among_equals_the_least_used_takes_it() -> None:
    route = chosen([Engine("a", 1, 5), Engine("b", 1, 4)])
    assert (route.engine_id, route.because) == ("b", Because.LEAST_USED)


def test_the_line_decides_though_another_has_fewer_in_flight() -> None:
    route = chosen([Engine("a", 0, 0, backlog_tokens=10_000), Engine("b", 5, 5)], Need(1000, 50))
    assert (route.engine_id, route.because) == ("b", Because.LEAST_TO_DO)


def test_what_is_cached_decides_only_where_another_has_no_more_to_do() -> None:
    has_it = Engine("a", num_cached=900)
    idle, busy = Engine("b", num_cached=0), Engine("b", 5, 5, backlog_tokens=9000, num_cached=0)
    assert chosen([has_it, idle], Need(1000)).because is Because.CACHED
    assert chosen([has_it, busy], Need(1000)).because is Because.LEAST_TO_DO
    also = Engine("c", 4, num_cached=900)
    assert chosen([has_it, also], Need(1000)).because is Because.FEWEST_IN_FLIGHT
    assert chosen([has_it, also, idle], Need(1000)).because is Because.CACHED


def test_a_copy_decides_only_where_another_would_have_been_chosen_without() -> None:
    has_it, idle = Engine("a", 9, 9, num_cached=1024), Engine("b", num_cached=0)
    copied = chosen([has_it, idle], Need(1100, 10), spread_tokens=1024)
    assert (copied.engine_id, copied.because) == ("b", Because.SPREAD)
    overloaded = Engine("a", 9, 9, backlog_tokens=20_000, num_cached=1024)
    route = chosen([overloaded, idle], Need(1100, 10), spread_tokens=1024)
    assert (route.engine_id, route.because) == ("b", Because.LEAST_TO_DO)


@pytest.mark.parametrize(
    "other",
    [
        Engine("b", has_place=False),
        Engine("b", is_draining=True),
        Engine("b", is_late=True),
        Engine("b", kv_tokens=10),
        Engine("b", is_kept=True),
        Engine("b", has_isolated=True),
    ],
)
def test_an_engine_without_another_that_could_have_it_is_no_better_one(other: Engine) -> None:
    route = chosen(
        [Engine("a", 9, 9, num_cached=512), other],
        Need(1000),
        leaves_room=True,
        needs_isolation=True,
    )
    assert (route.engine_id, route.because) == ("a", Because.ONLY_ONE)


def test_without_engines_the_request_waits_and_knows_why() -> None:
    route = chosen([])
    assert (route.engine_id, route.why_waiting) == (None, "no engine is ready")


def test_draining_engine_takes_only_what_has_nowhere_else_to_go() -> None:
    draining, other = Engine("a", is_draining=True), Engine("b", 9, 9)
    assert chosen([draining, other]).engine_id == "b"
    assert chosen([draining]).engine_id == "a"


def test_engine_that_is_leaving_takes_nothing() -> None:
    assert chosen([Engine("a", is_draining=True, is_leaving=True)]).engine_id is None


def test_engine_that_stands_still_takes_only_what_has_nowhere_else_to_go() -> None:
    still, other = Engine("a", is_late=True), Engine("b", 9, 9)
    assert chosen([still, other]).engine_id == "b"
    assert chosen([still]).engine_id == "a"
    full = Engine("b", has_place=False)
    assert chosen([still, full]).engine_id is None, "it waits for what turns"


def test_suspect_does_not_join_another_suspect() -> None:
    fleet = [Engine("a", has_isolated=True), Engine("b", 5, 5)]
    assert chosen(fleet, needs_isolation=True).engine_id == "b"
    assert chosen(fleet).engine_id == "a"
    route = chosen(fleet[:1], needs_isolation=True)
    assert (route.engine_id, route.why_waiting) == (None, "every engine has an isolated request")


asked = st.fixed_dictionaries(
    {
        "needs_isolation": st.booleans(),
        "leaves_room": st.booleans(),
        "number": st.integers(0, 1 << 32),
        "spread_tokens": st.one_of(st.just(0), st.integers(1, 2000)),
        "was_on_engine": st.booleans(),
    }
)


@given(fleets, needs, asked)
def test_all_engines_at_once_are_as_one_after_the_other(
    fleet: list[Engine], need: Need, asked: dict[str, Any]
) -> None:
    assert chosen(fleet, need, **asked) == plainly(fleet, need, **asked)


# All could have it, so that something has to decide.
open_engines = st.builds(
    Engine,
    engine_id=st.text("abcdef", min_size=1, max_size=3),
    num_in_flight=st.integers(0, 2),
    num_dispatched=st.integers(0, 2),
    backlog_tokens=st.sampled_from([0, 63, 64, 500, 9000]),
    computed_ratio=st.sampled_from([0.75, 1.0]),
    num_cached=st.sampled_from([None, 0, 63, 64, 896]),
)


@settings(max_examples=200)
@given(
    st.lists(open_engines, min_size=2, max_size=4, unique_by=lambda engine: engine.engine_id),
    st.builds(Need, num_tokens=st.sampled_from([130, 1000]), num_expected=st.integers(0, 20)),
    st.sampled_from([0, 0, 64, 896]),
)
def test_what_decided_is_the_same_by_both_ways(
    fleet: list[Engine], need: Need, spread_tokens: int
) -> None:
    route = chosen(fleet, need, spread_tokens=spread_tokens)
    assert route == plainly(fleet, need, spread_tokens=spread_tokens)


@pytest.mark.parametrize("num_engines", [1, 8, 64])
def test_many_engines_at_once_are_as_one_after_the_other(num_engines: int) -> None:
    chance = random.Random(num_engines)
    for _ in range(200):
        fleet = [
            Engine(
                f"e{number}",
                chance.randrange(64),
                chance.randrange(1000),
                backlog_tokens=chance.randrange(20_000),
                kv_tokens=chance.randrange(100_000),
                has_place=chance.random() < 0.8,
                has_place_for_moved=chance.random() < 0.9,
                is_kept=chance.random() < 0.2,
                has_full_line=chance.random() < 0.2,
                num_cached=chance.choice([0, 0, 128 * chance.randrange(100)]),
            )
            for number in range(num_engines)
        ]
        need = Need(chance.randrange(1, 32_000), chance.randrange(500))
        asked = {
            "leaves_room": chance.random() < 0.5,
            "number": chance.randrange(1 << 32),
            "spread_tokens": chance.choice([0, chance.randrange(1, 32_000)]),
            "was_on_engine": chance.random() < 0.3,
        }
        assert chosen(fleet, need, **asked) == plainly(fleet, need, **asked)


def test_beginning_that_is_to_spread_goes_where_least_is_to_do() -> None:
    has_it, idle = Engine("a", 9, 9, num_cached=1024), Engine("b", num_cached=0)
    need = Need(1100, 10)
    assert chosen([has_it, idle], need).engine_id == "a"
    route = chosen([has_it, idle], need, spread_tokens=1024)
    assert route.engine_id == "b"
    assert route.first_token_cost >= 1100, "there it has to be computed all the same"
    full = Engine("b", 1, 1, kv_tokens=1000, num_cached=0)
    assert chosen([has_it, full], need, spread_tokens=1024).engine_id == "a"


def test_nobody_waits_for_an_engine_that_has_no_more_of_it_cached_and_no_room() -> None:
    """New engines have few sequences: all would wait for their lines, and the others have room."""
    old = Engine("a", 60, num_cached=0)
    new = Engine("b", 2, backlog_tokens=9000, has_place=False, has_full_line=True, num_cached=0)
    assert chosen([old, new], Need(1000, 300)).engine_id == "a"
    has_it = replace(new, num_cached=900)
    assert chosen([old, has_it], Need(1000, 300)).awaited_id == "b"


def test_requests_of_many_gateways_do_not_all_go_to_one_of_many_engines() -> None:
    """Of nine engines some are as good as the idlest, and each request draws one of them."""
    fleet = [Engine(f"e{number}", num_in_flight=number) for number in range(9)]
    need = Need(500, 100)  # each sequence there costs 400 tokens and a step's 4
    routes = Counter(chosen(fleet, need, number=number).engine_id for number in range(720))
    assert routes == {"e0": 240, "e1": 240, "e2": 240}


def test_of_few_engines_all_choose_the_idlest() -> None:
    fleet = [Engine(f"e{number}", num_in_flight=number) for number in range(8)]
    routes = {chosen(fleet, Need(500, 100), number=number).engine_id for number in range(100)}
    assert routes == {"e0"}


def test_of_many_engines_the_one_with_the_beginning_is_chosen() -> None:
    fleet = [Engine(f"e{number}", num_cached=0) for number in range(9)]
    fleet[4] = Engine("e4", num_cached=900)
    routes = {chosen(fleet, Need(1000), number=number).engine_id for number in range(100)}
    assert routes == {"e4"}


def test_of_many_that_are_as_good_it_is_one_with_more_of_it_cached() -> None:
    # Three times 128 tokens are less than the sequences there are worth, and all are as good.
    fleet = [Engine(f"e{number}", num_cached=0) for number in range(9)]
    fleet[4] = Engine("e4", num_in_flight=2, num_cached=128)
    fleet[7] = Engine("e7", num_in_flight=1, num_cached=128)
    routes = {chosen(fleet, Need(1000, 50), number=number).engine_id for number in range(100)}
    assert routes == {"e4", "e7"}
