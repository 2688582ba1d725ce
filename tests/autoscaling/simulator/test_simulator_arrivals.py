"""Days built from traces and rates."""

import csv
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from autoscaling.simulator.world.arrivals import (
    RateProfile,
    Requests,
    build_day,
    constant_lengths,
    draw_poisson,
    stages,
    weekday,
)

AZURE_CODE = Path(__file__).parents[3] / (
    "../shared/data/traces/azure2023/AzureLLMInferenceTrace_code.csv"
)


def bursty(num: int = 4000, seed: int = 3) -> Requests:
    rng = np.random.default_rng(seed)
    gaps_s = rng.lognormal(-3.0, 1.5, num)
    inputs = rng.integers(1, 3000, num).astype(np.int32)
    return Requests(np.cumsum(gaps_s), inputs, (inputs // 7 + 1).astype(np.int32))


def variation_of_gaps(requests: Requests) -> float:
    gaps_s = np.diff(requests.arrival_s)
    return float(gaps_s.std() / gaps_s.mean())


def test_day_has_the_mean_rate_and_follows_the_profile() -> None:
    day = build_day(bursty(), mean_rate=3.0, seed=1)
    assert len(day) == round(3.0 * 86_400)
    assert day.arrival_s[-1] < 86_400
    by_hour = np.bincount((day.arrival_s // 3600).astype(int), minlength=24) / 3600
    assert np.argmin(by_hour) in range(2, 5)
    assert by_hour.max() / by_hour.min() == pytest.approx(6.4, rel=0.25)


def test_day_keeps_the_two_lengths_of_a_request_together() -> None:
    day = build_day(bursty(), mean_rate=1.0, seed=1)
    np.testing.assert_array_equal(day.output_tokens, day.input_tokens // 7 + 1)


def test_day_is_as_bursty_as_its_trace() -> None:
    trace = bursty()
    flat = stages((86_400.0, 1.0))
    day = build_day(trace, mean_rate=2.0, seed=1, profile=flat)
    assert variation_of_gaps(day) == pytest.approx(variation_of_gaps(trace), rel=0.25)


def test_day_of_the_code_trace_is_as_bursty_as_it() -> None:
    if not AZURE_CODE.exists():
        pytest.skip("the Azure trace is not here")
    with AZURE_CODE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    start = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    trace = Requests.of_rows(
        (
            (datetime.fromisoformat(row["TIMESTAMP"][:26]) - start).total_seconds(),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for row in rows
    )
    day = build_day(trace, mean_rate=5.0, seed=1, profile=stages((86_400.0, 1.0)))
    assert variation_of_gaps(trace) == pytest.approx(13, rel=0.1)
    assert variation_of_gaps(day) == pytest.approx(variation_of_gaps(trace), rel=0.25)
    assert day.input_tokens.mean() == pytest.approx(trace.input_tokens.mean(), rel=0.05)


def test_day_depends_on_its_seed_only() -> None:
    first, again, other = (build_day(bursty(), mean_rate=1.0, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.arrival_s, again.arrival_s)
    assert not np.array_equal(first.arrival_s, other.arrival_s)


def test_day_from_a_trace_shorter_than_a_block_works() -> None:
    day = build_day(bursty(5), mean_rate=0.1, seed=1, block_s=1e6)
    assert len(day) == 8640


def test_stages_give_each_its_rate() -> None:
    ramp = stages((600.0, 2.0), (600.0, 10.0), (600.0, 1.0))
    assert ramp.num_expected == pytest.approx(7800)
    counts = np.histogram(
        draw_poisson(ramp, constant_lengths(1, 1), 1).arrival_s, [0, 600, 1200, 1800]
    )[0]
    np.testing.assert_allclose(counts, [1200, 6000, 600], rtol=0.1)


def test_shares_of_a_slope_lie_where_the_areas_do() -> None:
    slope = RateProfile((0.0, 10.0), (0.0, 2.0))
    np.testing.assert_allclose(slope.at_share(np.array([0.0, 0.25, 1.0])), [0, 5, 10])
    fall = RateProfile((0.0, 10.0), (2.0, 0.0))
    np.testing.assert_allclose(fall.at_share(np.array([0.0, 0.75, 1.0])), [0, 5, 10])


def test_weekday_has_its_mean() -> None:
    assert weekday(7.0, days=2).num_expected == pytest.approx(7.0 * 2 * 86_400)


def test_rows_may_come_in_any_order_and_count_at_least_one_token() -> None:
    requests = Requests.of_rows([(2.0, 10, 0), (1.0, 0, 5)])
    assert requests.arrival_s.tolist() == [1.0, 2.0]
    assert requests.input_tokens.tolist() == [1, 10]
    assert requests.output_tokens.tolist() == [5, 1]


def test_requests_that_make_no_sense_are_refused() -> None:
    ones = np.ones(2, np.int32)
    with pytest.raises(ValueError, match="in order"):
        Requests(np.array([2.0, 1.0]), ones, ones)
    with pytest.raises(ValueError, match="at least 1"):
        Requests(np.array([1.0, 2.0]), ones, 0 * ones)
    with pytest.raises(ValueError, match="one length"):
        Requests(np.array([1.0]), ones, ones)


@pytest.mark.parametrize(
    ("times_s", "rates_per_s", "message"),
    [
        ((0.0,), (1.0,), "1 points"),
        ((1.0, 0.0), (1.0, 1.0), "in order"),
        ((0.0, 1.0), (0.0, 0.0), "zero everywhere"),
    ],
)
def test_profile_that_makes_no_sense_is_refused(
    times_s: tuple[float, ...], rates_per_s: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RateProfile(times_s, rates_per_s)
