"""What engines do in a second, from sums: those of one window, and of one life."""

import pytest

from serving.domain.capacity.engine_rates import EngineRate, rate_stats, rates_of_stats
from serving.gateway.telemetry.engine_work import EngineWork
from serving.link.messages import EngineStats

MODEL = "org/m:1"


def sums(at_s: float) -> EngineStats:
    """An engine that makes 20 steps of 40 ms a second."""
    return EngineStats(
        prompt_tokens=round(500 * at_s),
        local_cached_tokens=round(100 * at_s),
        external_cached_tokens=round(50 * at_s),
        generation_tokens=round(200 * at_s),
        num_steps=round(20 * at_s),
        busy_s=0.8 * at_s,
    )


def test_rates_are_of_the_last_half_minute_and_without_what_caches_had() -> None:
    work = EngineWork()
    for second in range(0, 24, 2):
        assert work.look(float(second), [("e", "spot", sums(second), 0.0)]) == []
    for second in range(24, 90, 2):
        (rate,) = work.look(float(second), [("e", "spot", sums(second), 0.0)])
        assert rate == EngineRate("e", "spot", 350.0, 200.0, pytest.approx(0.04))


def test_use_of_the_cache_is_that_of_the_window() -> None:
    work = EngineWork()
    for second in range(0, 62, 2):
        usage = 0.2 if second < 46 else 0.8
        rates = work.look(float(second), [("e", "spot", sums(second), usage)])
    (rate,) = rates
    assert rate.kv_usage_ratio == pytest.approx(0.5)


def test_engine_that_begins_anew_or_was_away_has_no_rate_at_first() -> None:
    work = EngineWork()
    for second in range(0, 40, 2):
        work.look(float(second), [("e", "spot", sums(second), 0.0)])
    assert work.look(40.0, [("e", "spot", sums(0), 0.0)]) == []
    for second in range(42, 80, 2):
        work.look(float(second), [("e", "spot", sums(second - 40), 0.0)])
    assert work.look(80.0, []) == []
    assert work.look(82.0, [("e", "spot", sums(42), 0.0)]) == []


def test_engine_without_a_step_has_no_rate() -> None:
    work = EngineWork()
    for second in range(0, 60, 2):
        assert work.look(float(second), [("e", "spot", EngineStats(), 0.0)]) == []


def test_rates_come_back_as_they_were() -> None:
    rates = (EngineRate("a~2", "spot", 1.5, 2.5, 0.04, 0.7), EngineRate("b", "flex-start", 1, 2, 3))
    stats = rate_stats(MODEL, rates) | rate_stats("org/m", rates[:1])
    assert rates_of_stats(MODEL, stats) == rates
    assert rates_of_stats("nobody", stats) == ()
    del stats[f"engine|{MODEL}|spot|a~2|step_s"]
    assert rates_of_stats(MODEL, stats) == rates[1:], "half a report is none"
