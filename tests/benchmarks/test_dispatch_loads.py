"""The made-up loads, at a small size: each way to choose answers all, and shows what it is for."""

from dataclasses import replace

import pytest

from benchmarks.dispatch_loads import (
    HOT,
    KINDS_OF_HOT,
    LONG,
    LoadOutcome,
    late_engine,
    late_row,
    row,
    run,
)
from benchmarks.dispatch_trace import ALL_KNOWN
from tests.gateway.dispatch.floods import AT_ONE, beside_a_flood
from tests.gateway.dispatch.simulated_fleet import quantile

pytestmark = pytest.mark.slow


def hot(kind: str) -> LoadOutcome:
    return run(replace(HOT, num_requests=80), kind, 1)


def test_each_way_to_choose_answers_a_hot_beginning() -> None:
    outcomes = {kind: hot(kind) for kind in (*KINDS_OF_HOT, ALL_KNOWN)}
    blind = outcomes.pop("fewest requests")
    assert blind.cached_ratio > 0
    for outcome in outcomes.values():
        assert outcome.cached_ratio > blind.cached_ratio, outcome.kind
        assert not outcome.pauses
        assert outcome.spread >= outcome.least_spread >= 1


def test_pauses_are_told_apart_by_what_was_cached_where_streams_went() -> None:
    load = replace(LONG, num_requests=160)
    told = run(load, "room and cache", 2, dies_after=0.5)
    counts = {each.which: each.count for each in told.pauses}
    assert counts.pop("") == sum(counts.values()) > 0
    assert "cached " in row(told)
    # Who knows nothing of caches cannot tell.
    blind = run(load, "fewest requests", 2, dies_after=0.5)
    assert [each.which for each in blind.pauses] == [""]


def test_a_late_engine_gets_nothing_of_a_line_that_was_given_away_at_once() -> None:
    before, now = (late_engine(kind, 300) for kind in ("fewest requests", "room and cache"))
    assert (before.first_token_s, before.num_given_in_1_s) == (None, 0)
    assert now.first_token_s is not None
    assert now.num_given_in_1_s > 0
    assert now.done_s < before.done_s
    assert "| never |" in late_row(before)


def test_beside_a_flood_who_comes_first_waits_in_its_line() -> None:
    fair, _ = beside_a_flood(AT_ONE, 500, num_requests=100)
    others, flood = beside_a_flood(AT_ONE, 500, num_requests=100, knows_tenants=False)
    assert quantile(others, 0.5) > 10 * quantile(fair, 0.5)
    assert quantile(others, 0.5) == pytest.approx(quantile(flood, 0.5), rel=0.3)
