"""What engines do in a second, from sums: those of one window, and of one life."""

import pytest

from autoscaling.policy.capacity.shown_capacity import carried_factor
from autoscaling.policy.rules import Rules
from serving.domain.capacity.engine_rates import EngineRate, rate_stats, rates_of_stats
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.gateway.telemetry.engine_work import EngineSteps, EngineWork, StepPace
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


def test_engine_with_a_part_of_a_slice_is_told_of_as_a_whole_one() -> None:
    """By the law of a slice, as it is measured, its parts carry what it carries."""
    num_engines, step_s = 8, 0.04
    part = CapacityProfile(
        model="m",
        engine="paced",
        base_s=0.02,
        per_sequence_s=0.0005,
        per_prompt_token_s=0.00002,
        max_num_seqs=64,
        measured_on="2026-11-27",
        source="made up",
    )
    whole = part.of_slice(num_engines)
    requests_per_s = part.max_requests_per_s(100.0, 50.0, step_s)
    assert whole.max_requests_per_s(100.0, 50.0, step_s) == pytest.approx(8 * requests_per_s)
    rate = EngineRate("e", "spot", 100 * requests_per_s, 50 * requests_per_s, step_s)
    rules = Rules(Objectives(ttft_s=2.5, tpot_s=step_s), tpot_margin=1.0)
    factor = carried_factor(rate.of_slice(num_engines), whole, rules)
    assert factor == pytest.approx(1.0)
    assert carried_factor(rate.of_slice(num_engines), whole, rules) == pytest.approx(
        carried_factor(rate, part, rules)
    )


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


def steps(**engines: tuple[int, float, int]) -> dict[str, EngineSteps]:
    return {name: EngineSteps(*each) for name, each in engines.items()}


def test_pace_is_of_the_steps_since_the_last_look_weighed_by_sequences() -> None:
    pace = StepPace()
    assert pace.look(0.0, steps(a=(100, 5.0, 30), b=(100, 5.0, 10)), 0.1) is None
    seen = pace.look(5.0, steps(a=(200, 9.0, 30), b=(150, 9.0, 10)), 0.1)
    assert seen is not None
    # 40 ms with 30 sequences, 80 ms with 10.
    assert (seen.num_sequences, seen.most_s) == (40, 0.1)
    assert seen.step_s == pytest.approx(0.05)
    assert seen.room == 40
    # Asked again at once it is the same, whatever engines told meanwhile.
    assert pace.look(6.0, steps(a=(201, 9.9, 30)), 0.1) == seen


def test_what_was_seen_long_ago_is_no_pace_of_now() -> None:
    pace = StepPace()
    pace.look(0.0, steps(a=(100, 5.0, 30)), 0.1)
    assert pace.look(3600.0, steps(a=(90_000, 3600.0, 30)), 0.1) is None
    seen = pace.look(3605.0, steps(a=(90_100, 3605.0, 30)), 0.1)
    assert seen is not None
    assert seen.step_s == pytest.approx(0.05)


def test_engine_that_is_new_or_idle_or_has_begun_anew_has_no_part_in_the_pace() -> None:
    pace = StepPace()
    pace.look(0.0, steps(a=(100, 5.0, 30), b=(100, 5.0, 10), c=(50, 1.0, 5)), 0.1)
    later = steps(a=(200, 9.0, 30), b=(3, 0.9, 10), c=(50, 1.0, 5), d=(7, 7.0, 7), e=(9, 9.0, 0))
    seen = pace.look(5.0, later, 0.1)
    assert seen is not None
    assert (seen.num_sequences, seen.step_s) == (30, pytest.approx(0.04))
    assert pace.look(10.0, later, 0.1) is None
