"""The file of objectives, and how values are judged against it."""

from pathlib import Path

import pytest

from loadtest.errors import LoadTestError
from loadtest.scorecard.prices import read_prices
from loadtest.scorecard.slo import (
    NO_OBJECTIVES,
    Evidence,
    ServiceLevel,
    judge,
    read_slo,
)
from loadtest.scorecard.spread import Spread, spread_of

EVERYTHING = """
ttft_s: {p95: 1.0, p99: 3}
tpot_s: {p99: 0.1}
e2e_s: {mean: 20}
error_ratio: 0.001
goodput: {ttft_s: 3, tpot_s: 0.1, at_least: 0.99}
min_throughput_tokens_per_s: 500
max_lost_tokens: 0
max_cost_usd_per_million_tokens: 2.5
client: {cpu_p90_ratio: 0.9}
"""

MEASURED = Evidence(
    ttft_scheduled_s=spread_of([0.5] * 49 + [3.0]),
    tpot_s=spread_of([0.05]),
    e2e_scheduled_s=spread_of([19.0]),
    error_ratio=0.001,
    goodput_ratio=0.99,
    output_tokens_per_s=500.0,
    lost_tokens=0,
    usd_per_million_output_tokens=2.5,
)
NOTHING = Evidence(Spread(), Spread(), Spread(), None, None, None, None, None)


def level_of(tmp_path: Path, text: str) -> ServiceLevel:
    file = tmp_path / "slo.yaml"
    file.write_text(text)
    return read_slo(file)


def test_values_at_their_limits_meet_every_objective(tmp_path: Path) -> None:
    objectives = judge(level_of(tmp_path, EVERYTHING), MEASURED)
    assert [objective.name for objective in objectives] == [
        "ttft_s.p95",
        "ttft_s.p99",
        "tpot_s.p99",
        "e2e_s.mean",
        "error_ratio",
        "goodput.at_least",
        "min_throughput_tokens_per_s",
        "max_lost_tokens",
        "max_cost_usd_per_million_tokens",
    ]
    assert all(objective.ok for objective in objectives)


def test_objectives_without_samples_are_missed(tmp_path: Path) -> None:
    objectives = judge(level_of(tmp_path, EVERYTHING), NOTHING)
    assert len(objectives) == 9
    assert not any(objective.ok for objective in objectives)
    assert {objective.value for objective in objectives} == {None}


def test_ttft_and_e2e_are_judged_from_the_scheduled_instant(tmp_path: Path) -> None:
    objectives = judge(level_of(tmp_path, EVERYTHING), MEASURED)
    metrics = {objective.name: objective.metric for objective in objectives}
    assert metrics["ttft_s.p99"] == "ttft_scheduled_s.p99"
    assert metrics["e2e_s.mean"] == "e2e_scheduled_s.mean"


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("ttft_s: {p99: 2.99}", "ttft_s.p99"),
        ("tpot_s: {p50: 0.049}", "tpot_s.p50"),
        ("e2e_s: {max: 18.9}", "e2e_s.max"),
        ("error_ratio: 0.0009", "error_ratio"),
        ("goodput: {ttft_s: 1, at_least: 0.991}", "goodput.at_least"),
        ("min_throughput_tokens_per_s: 500.1", "min_throughput_tokens_per_s"),
        ("max_cost_usd_per_million_tokens: 2.49", "max_cost_usd_per_million_tokens"),
    ],
)
def test_values_beyond_their_limits_miss(tmp_path: Path, text: str, objective: str) -> None:
    (judged,) = judge(level_of(tmp_path, text), MEASURED)
    assert (judged.name, judged.ok) == (objective, False)


def test_goodput_without_a_share_is_reported_and_not_judged(tmp_path: Path) -> None:
    assert judge(level_of(tmp_path, "goodput: {ttft_s: 1}"), NOTHING) == ()
    assert judge(NO_OBJECTIVES, NOTHING) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft: {p95: 1}", ["ttft: no such field; allowed: ttft_s, tpot_s"]),
        ("ttft_s: {p97: 1}", ["ttft_s.p97: no such field; allowed: mean, p50, p90, p95, p99"]),
        ("ttft_s: {p95: 0}", ["ttft_s.p95: 0: input should be greater than 0"]),
        ("ttft_s: {p95: '1'}", ["ttft_s.p95: '1': input should be a valid number"]),
        ("ttft_s: {}", ["ttft_s: {}: at least one of mean, p50"]),
        ("goodput: {at_least: 1}", ["goodput: {'at_least': 1}: at least one of ttft_s"]),
        ("error_ratio: 1.5", ["error_ratio: 1.5: input should be less than or equal to 1"]),
        ("client: {loop_lag: 1}", ["client.loop_lag: no such field; allowed: loop_lag_p99_s"]),
        ("a: 1\nb: 2", ["a: no such field", "b: no such field"]),
        ("[1, 2]", ["the file: [1, 2]: input should be"]),
        ("a: [", ["not readable as YAML"]),
    ],
)
def test_file_is_refused_with_field_value_and_what_is_allowed(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(LoadTestError) as caught:
        level_of(tmp_path, text)
    for word in words:
        assert word in str(caught.value)
    assert "slo.yaml" in str(caught.value)


def test_prices_are_read_by_compute_class(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("spot: 0.593\nreserved: 1.2\n")
    assert read_prices(file) == {"spot": 0.593, "reserved": 1.2}


@pytest.mark.parametrize("text", ["spot: -1", "spot: 593", "spot: cheap", "- 1"])
def test_price_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(LoadTestError, match="input should be"):
        read_prices(file)
