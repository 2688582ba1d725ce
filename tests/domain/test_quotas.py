"""What counts of a quota: what was used in any span of its period, and when there is room again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.usage.quotas import (
    Period,
    Quota,
    QuotaKind,
    TenantUse,
    UsageWindow,
    falls_to_in_s,
    nearest_uses,
    used,
)
from serving.domain.usage.usage_report import period_of

START_S = 1_790_000_000.0


def now_used(window: UsageWindow, now_s: float) -> float:
    return used((window.parts,), window.period.first_part(now_s))


@pytest.mark.parametrize("period", Period)
def test_what_was_used_counts_for_its_period_and_a_sixtieth_more_at_most(period: Period) -> None:
    window = UsageWindow(period)
    window.add(7, START_S)
    assert now_used(window, START_S) == 7
    assert now_used(window, START_S + period.seconds) == 7
    assert now_used(window, START_S + period.seconds * (1 + 1 / 60) + 0.01) == 0


TIMES = st.lists(st.floats(0.0, 300.0), min_size=1, max_size=300)


@given(TIMES, st.integers(1, 20))
def test_no_span_of_a_period_has_more_than_the_limit(times: list[float], limit: int) -> None:
    window, taken = UsageWindow(Period.MINUTE), []
    for at_s in sorted(times):
        if now_used(window, START_S + at_s) + 1 <= limit:
            window.add(1, START_S + at_s)
            taken.append(at_s)
    for number, at_s in enumerate(taken):
        assert sum(at_s <= other <= at_s + 60 for other in taken[number:]) <= limit


@given(TIMES, st.integers(0, 20), st.integers(0, 1000))
def test_there_is_room_when_it_was_told_and_not_before(
    times: list[float], most: int, seed: int
) -> None:
    chance = random.Random(seed)
    windows = [UsageWindow(Period.MINUTE) for _ in range(3)]
    for at_s in sorted(times):
        chance.choice(windows).add(1, START_S + at_s)
    now_s = START_S + max(times)
    parts = [window.parts for window in windows]
    in_s = falls_to_in_s(parts, Period.MINUTE, most, now_s)
    # Sums of floats: a moment before a part ends it may have ended.
    assert used(parts, Period.MINUTE.first_part(now_s + in_s + 1e-3)) <= most
    if in_s > 0.01:
        assert used(parts, Period.MINUTE.first_part(now_s + in_s - 1e-3)) > most
    else:
        assert used(parts, Period.MINUTE.first_part(now_s)) <= most


def test_what_was_counted_too_much_is_given_back_where_it_was_counted() -> None:
    window = UsageWindow(Period.MINUTE)
    window.add(100, START_S)
    window.add(5, START_S + 30)
    window.add(-60, START_S)
    assert now_used(window, START_S + 30) == 45
    assert now_used(window, START_S + 70) == 5


def test_a_window_keeps_no_more_than_it_needs() -> None:
    window = UsageWindow(Period.MINUTE)
    for second in range(10_000):
        window.add(1, START_S + second)
    assert len(window.parts) <= 121
    assert now_used(window, START_S + 9_999) == 61


def test_a_quota_is_told_from_others_by_all_but_its_limit() -> None:
    hour = Quota(QuotaKind.TOKENS, 5, Period.HOUR)
    assert hour.key == Quota(QuotaKind.TOKENS, 9, Period.HOUR).key
    keys = {
        hour.key,
        Quota(QuotaKind.REQUESTS, 5, Period.HOUR).key,
        Quota(QuotaKind.TOKENS, 5, Period.DAY).key,
        Quota(QuotaKind.TOKENS, 5, Period.HOUR, frozenset({"a"})).key,
        Quota(QuotaKind.TOKENS, 5, Period.HOUR, frozenset({"a", "b"})).key,
        Quota(QuotaKind.CONCURRENT, 5).key,
    }
    assert len(keys) == 6
    assert str(Quota(QuotaKind.CHIP_SECONDS, 90.5, Period.DAY, frozenset({"b", "a"}))) == (
        "90.5 chip-seconds per day of a, b"
    )


def test_a_quota_of_some_models_covers_these_and_their_adapters_by_name() -> None:
    some = Quota(QuotaKind.TOKENS, 5, Period.HOUR, frozenset({"llama", "sql"}))
    assert some.covers(("llama", "llama"))
    assert some.covers(("other", "sql"))
    assert not some.covers(("other",))
    assert Quota(QuotaKind.CONCURRENT, 5).covers(("other",))


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        (Quota(QuotaKind.TOKENS, 5_000_000, Period.DAY), "5,000,000 tokens per day"),
        (Quota(QuotaKind.USD, 0.1 + 0.2, Period.HOUR), "0.3 usd per hour"),
        (
            Quota(QuotaKind.CONCURRENT, 4, models=frozenset({"b", "a"})),
            "4 concurrent of a, b",
        ),
    ],
)
def test_a_quota_is_told_in_digits(quota: Quota, words: str) -> None:
    assert str(quota) == words


def test_the_uses_nearest_to_their_limits_come_first_whatever_they_count() -> None:
    tokens = Quota(QuotaKind.TOKENS, 1_000_000, Period.DAY)
    usd = Quota(QuotaKind.USD, 2.0, Period.HOUR)
    uses = [
        TenantUse("b", tokens, 0, 0),
        TenantUse("a", tokens, 0, 0),
        TenantUse("refused", tokens, 0, 7),
        TenantUse("half", tokens, 500_000, 0),
        TenantUse("over", usd, 2.5, 0),
    ]
    assert [use.tenant for use in nearest_uses(uses, 9)] == ["over", "half", "refused", "a", "b"]
    assert [use.tenant for use in nearest_uses(uses, 2)] == ["over", "half"]


@pytest.mark.parametrize("kind", QuotaKind)
def test_refusals_are_counted_apart_from_what_is_used(kind: QuotaKind) -> None:
    period = None if kind is QuotaKind.CONCURRENT else Period.DAY
    quotas = [Quota(kind, 1, period), Quota(kind, 1, period, frozenset({"org/one"}))]
    keys = {each.key for each in quotas} | {each.refusals_key for each in quotas}
    assert len(keys) == 4
    periods = {period_of(("acme", each.refusals_key)) for each in quotas}
    assert periods == {period or Period.HOUR}
