"""Two runs against each other: differences that are there are shown, others are not."""

import json

import numpy as np
import pytest
from made_run import MadeRun, eventful_run, failed_request, made_request

from loadtest.errors import ExitCode
from loadtest.report.html import comparison_page
from loadtest.scorecard.bootstrap import mean_figure, percentile_figure, share_figure
from loadtest.scorecard.compare import Comparison, ComparisonOutcome, Difference, NamedRun, compare
from loadtest.scorecard.slo import NO_OBJECTIVES, GoodputLimits, ServiceLevel


def random_run(seed: int, *, slower: float = 1.0, num: int = 1200, **changes) -> MadeRun:
    """Requests with lognormal TTFT and TPOT, evenly due over a minute."""
    chance = np.random.default_rng(seed)
    requests = tuple(
        made_request(
            n,
            60.0 * n / num,
            ttft_s=float(slower * chance.lognormal(-2, 0.3)),
            tpot_s=float(slower * chance.lognormal(-4, 0.1)),
            tokens=21,
        )
        for n in range(num)
    )
    return MadeRun(requests).but(**changes)


def compared(
    a: MadeRun, b: MadeRun, level: ServiceLevel = NO_OBJECTIVES, seed: int = 0
) -> Comparison:
    return compare(NamedRun("A", a.stored), NamedRun("B", b.stored), level, seed)


def by_metric(comparison: Comparison) -> dict[str, Difference]:
    return {found.metric: found for found in comparison.differences}


def test_slower_run_is_worse_and_the_other_way_round_better() -> None:
    fast, slow = random_run(1), random_run(2, slower=1.3)
    there, back = by_metric(compared(fast, slow)), by_metric(compared(slow, fast))
    for metric in ("TTFT p50", "TTFT p95", "TTFT mean", "TPOT p50", "TPOT p99", "E2E mean"):
        assert there[metric].outcome is ComparisonOutcome.WORSE
        assert back[metric].outcome is ComparisonOutcome.BETTER
    ttft = there["TTFT p50"]
    assert ttft.low is not None
    assert ttft.high is not None
    assert 0 < ttft.low < 0.3 * 0.135 < ttft.high


def test_run_against_itself_shows_no_difference() -> None:
    run = random_run(1)
    found = compared(run, run, ServiceLevel(goodput=GoodputLimits(ttft_s=0.2)))
    assert {difference.outcome for difference in found.differences} == {
        ComparisonOutcome.NO_DIFFERENCE_SHOWN
    }
    assert {difference.difference for difference in found.differences} == {0.0}
    assert all("no difference shown" in sentence for sentence in found.sentences)


def test_interval_misses_the_truth_about_as_often_as_it_says() -> None:
    # Pairs of runs of one law: a difference may be shown in 5 % of them.
    wrong = sum(
        by_metric(compared(random_run(2 * n, num=200), random_run(2 * n + 1, num=200)))[
            "TTFT mean"
        ].outcome
        is not ComparisonOutcome.NO_DIFFERENCE_SHOWN
        for n in range(20)
    )
    assert wrong <= 3


def test_goodput_and_throughput_are_better_when_more() -> None:
    run = random_run(1)
    half = run.but(requests=run.requests[::2])
    level = ServiceLevel(goodput=GoodputLimits(ttft_s=0.135))
    found = by_metric(compared(half, run, level))
    assert found["throughput"].outcome is ComparisonOutcome.BETTER
    slower = by_metric(compared(run, random_run(2, slower=1.5), level))
    assert slower["goodput"].outcome is ComparisonOutcome.WORSE


def test_more_failures_are_worse() -> None:
    run = random_run(1)
    failures = tuple(failed_request(5000 + n, 1.0 + n / 2, "timeout") for n in range(60))
    found = by_metric(compared(run, run.but(requests=(*run.requests, *failures))))
    assert found["error ratio"].outcome is ComparisonOutcome.WORSE
    assert found["error ratio"].n_b == 1260


def test_too_few_requests_are_not_judged_at_their_far_percentiles() -> None:
    found = by_metric(compared(random_run(1, num=120), random_run(2, num=120, slower=3.0)))
    assert found["TTFT p95"].outcome is ComparisonOutcome.WORSE
    assert found["TTFT p99"].outcome is ComparisonOutcome.NOT_JUDGED
    assert found["TTFT p99"].low is None


def test_missing_samples_stay_missing() -> None:
    broken = MadeRun(tuple(failed_request(n, n / 10, "connect") for n in range(200)))
    comparison = compared(random_run(1), broken)
    ttft = by_metric(comparison)["TTFT p50"]
    assert (ttft.b, ttft.difference, ttft.low) == (None, None, None)
    assert "not both runs have samples" in comparison.sentences[0]
    assert "TTFT" in comparison_page(comparison)


def test_invalid_run_is_not_judged() -> None:
    comparison = compared(random_run(1), random_run(2, slower=2.0, client=()))
    assert comparison.invalid
    assert comparison.invalid[0].startswith("B: loop lag p99")
    assert {difference.outcome for difference in comparison.differences} == {
        ComparisonOutcome.NOT_JUDGED
    }
    assert comparison.exit_code is ExitCode.CLIENT_INVALID
    assert "INVALID" in comparison_page(comparison)


def test_different_plans_are_a_caution_and_places_are_none() -> None:
    a = random_run(1, plan={"rate": 2.0, "url": "http://a", "shape": {"law": "poisson"}})
    b = random_run(1, plan={"rate": 3.0, "url": "http://b", "shape": {"law": "poisson"}})
    comparison = compared(a, b)
    assert comparison.plan_differences == ("rate 2.0 and 3.0",)
    assert any("rate 2.0 and 3.0" in caution for caution in comparison.cautions)
    assert not compared(a, a).cautions


def test_same_seed_gives_the_same_intervals() -> None:
    a, b = random_run(1), random_run(2)
    assert compared(a, b, seed=5).to_json() == compared(a, b, seed=5).to_json()
    assert compared(a, b, seed=5).to_json() != compared(a, b, seed=6).to_json()
    assert json.loads(compared(a, b).to_json())["version"] == 1


def test_page_escapes_what_runs_bring_along() -> None:
    comparison = compare(
        NamedRun("<b>A</b>", eventful_run().stored),
        NamedRun("B", eventful_run(4).stored),
        NO_OBJECTIVES,
        0,
    )
    page = comparison_page(comparison)
    assert "&lt;b&gt;A&lt;/b&gt;" in page
    assert "<b>A" not in page


def test_drawn_percentiles_spread_as_redrawn_samples_do() -> None:
    chance = np.random.default_rng(0)
    sample = chance.lognormal(0, 1, 400)
    figure = percentile_figure(sample.tolist(), 0.95)
    assert figure.draw is not None
    direct = [
        np.percentile(chance.choice(sample, len(sample)), 95, method="inverted_cdf")
        for _ in range(2000)
    ]
    drawn = figure.draw(chance)
    assert np.percentile(drawn, [5, 50, 95]) == pytest.approx(
        np.percentile(direct, [5, 50, 95]), rel=0.08
    )
    assert set(drawn) <= set(sample)


def test_drawn_means_and_shares_have_their_standard_errors() -> None:
    chance = np.random.default_rng(0)
    mean = mean_figure(chance.normal(10, 2, 900).tolist())
    mean_of_many = mean_figure(chance.normal(10, 2, 40_000).tolist())
    share = share_figure(90, 900)
    assert mean.draw is not None
    assert mean_of_many.draw is not None
    assert share.draw is not None
    assert mean.draw(chance).std() == pytest.approx(2 / 30, rel=0.15)
    assert mean_of_many.draw(chance).std() == pytest.approx(2 / 200, rel=0.1)
    assert share.draw(chance).std() == pytest.approx((0.1 * 0.9 / 900) ** 0.5, rel=0.1)
