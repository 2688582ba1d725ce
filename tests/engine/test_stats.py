"""The sums of an engine: what counts as a step's time, and what an engine does not have."""

from serving.engine.stats import StatsCollector, StepCount
from serving.link.messages import ITERATION_BOUNDS


def test_steps_add_up() -> None:
    meter = StatsCollector()
    first = StepCount(2, prompt_tokens=30, computed_tokens=20, local_cached_tokens=10)
    meter.stepped(first, 1.0, goes_on=True)
    meter.stepped(StepCount(2, num_preemptions=1), 1.5, goes_on=False)
    stats = meter.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (30, 4)
    assert (stats.local_cached_tokens, stats.num_preemptions) == (10, 1)
    assert stats.iteration_tokens == 22 + 2
    counts = dict(zip(ITERATION_BOUNDS, stats.iteration_counts, strict=False))
    assert {bound: count for bound, count in counts.items() if count} == {8: 1, 32: 1}


def test_step_with_more_tokens_than_the_last_bound_counts_beyond_it() -> None:
    meter = StatsCollector()
    meter.stepped(StepCount(computed_tokens=ITERATION_BOUNDS[-1] + 1), 0.0, goes_on=False)
    assert meter.stats().iteration_counts == [0] * len(ITERATION_BOUNDS) + [1]


def test_time_of_an_idle_engine_is_in_no_step() -> None:
    meter = StatsCollector()
    meter.stepped(StepCount(1), 10.0, goes_on=True)
    meter.stepped(StepCount(1), 10.25, goes_on=False)
    meter.stepped(StepCount(1), 99.0, goes_on=True)
    meter.stepped(StepCount(1), 99.5, goes_on=True)
    stats = meter.stats()
    assert (stats.num_steps, stats.busy_s) == (2, 0.75)


def test_what_an_engine_does_not_have_is_none_and_not_zero() -> None:
    stats = StatsCollector().stats()
    assert (stats.prefix_cache, stats.external_prefix_cache, stats.drafts) == (
        None,
        None,
        None,
    )


def test_caches_and_drafts_add_up() -> None:
    meter = StatsCollector(prefix_cache=(0, 0))
    for _ in range(2):
        meter.looked_up(100, 60)
        meter.looked_up_outside(40, 4)
        meter.drafted(3, 9, 5, [3, 2, 0])
    stats = meter.stats()
    assert (stats.prefix_cache, stats.external_prefix_cache) == ((200, 120), (80, 8))
    assert (stats.drafts, stats.accepted_by_position) == ((6, 18, 10), [6, 4, 0])
