"""How many gateways a load needs, against what was measured, and the page that says so."""

import math
from pathlib import Path

import pytest
import yaml

from serving.domain import limits
from serving.domain.capacity.gateway_sizing import (
    FILL_RATIO,
    FILL_RATIO_ONE_AWAY,
    OWN_RATIO,
    REQUEST_S,
    TOKEN_S,
    EngineOutput,
    gateway_cores,
    needed_gateways,
)
from serving.domain.capacity.slice_profile import (
    ASSUMED_OUTPUT_TOKENS,
    CapacityProfile,
    full_batch_tokens_per_s,
)
from serving.gateway.streams.pace import WINDOW_S, HoldBounds, HoldPace, ThreadTimes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate" / "gateways.md").read_text(encoding="utf-8")
# Answers that the page has a row for.
ANSWERS = (32, ASSUMED_OUTPUT_TOKENS, 1024)
SCENARIOS = {
    "azure-day": "70 billion parameters on v6e 2x4 (expected)",
    "llmd-ramp": "Qwen3-32B (llm-d's benchmark)",
    "scale-1000": "made up for scale",
}


def engines(count: int, tokens_per_s: float = 0.0) -> EngineOutput:
    return EngineOutput(count, tokens_per_s, f"{count} engines")


@pytest.mark.parametrize(
    ("outputs", "number"),
    [([], 1), ([engines(0)], 1), ([engines(1)], 1), ([engines(2)], 2), ([engines(1)] * 2, 2)],
)
def test_without_load_there_is_one_gateway_and_a_spare_where_an_engine_has_one(
    outputs: list[EngineOutput], number: int
) -> None:
    count = needed_gateways(outputs)
    assert count.number == number
    assert "0 tokens/s" in count.reason


@pytest.mark.parametrize("num_engines", [1, 2, 1000])
@pytest.mark.parametrize("tokens_per_s", [1, 9_000, 20_000, 50_000, 400_000, 1e7, 1e12])
def test_no_gateway_is_fuller_than_allowed_and_one_fewer_would_be(
    num_engines: int, tokens_per_s: float
) -> None:
    count = needed_gateways([engines(num_engines, tokens_per_s)])
    cores = gateway_cores(tokens_per_s, tokens_per_s / ASSUMED_OUTPUT_TOKENS)

    def is_enough(number: int) -> bool:
        full = number >= 1 and OWN_RATIO + cores / number <= FILL_RATIO * (1 + 1e-9)
        left = number - 1
        one_away = left >= 1 and OWN_RATIO + cores / left <= FILL_RATIO_ONE_AWAY * (1 + 1e-9)
        return full and (one_away or num_engines == 1)

    assert is_enough(count.number)
    assert not is_enough(count.number - 1)
    ratio = FILL_RATIO_ONE_AWAY if "away" in count.reason else FILL_RATIO
    assert f"at most {ratio:g} of one" in count.reason


def test_large_fleets_need_no_spare_because_one_is_a_small_part() -> None:
    tokens_per_s = 1e6
    alone = needed_gateways([engines(1, tokens_per_s)])
    assert needed_gateways([engines(500, tokens_per_s)]).number == alone.number == 87


def test_rates_that_are_expected_take_the_place_of_what_engines_could_emit() -> None:
    outputs = [engines(100, 1e6)]
    few = needed_gateways(outputs, tokens_per_s=1000.0)
    assert few.number == 2
    assert few.reason.startswith("1,000 tokens/s (expected) and 4 requests/s (answers of 256")
    short = needed_gateways(outputs, tokens_per_s=1000.0, requests_per_s=1000.0)
    assert short.number == math.ceil(gateway_cores(1000, 1000) / (FILL_RATIO - OWN_RATIO))
    assert "1,000 requests/s (expected)" in short.reason


@pytest.mark.parametrize("rate", [-1.0, math.inf, math.nan])
def test_rate_that_is_no_rate_is_refused_by_name(rate: float) -> None:
    with pytest.raises(ValueError, match="tokens_per_s"):
        needed_gateways([engines(1)], tokens_per_s=rate)
    with pytest.raises(ValueError, match="requests_per_s"):
        needed_gateways([engines(1)], requests_per_s=rate)


@pytest.mark.parametrize(
    ("streams", "measured_us"),
    [(64, 50.1), (64, 50.4), (128, 44.6), (128, 39.0), (256, 34.4), (384, 25.2), (512, 23.9)],
)
def test_rule_takes_no_less_than_was_measured(streams: int, measured_us: float) -> None:
    """Of one gateway: `docs/results/benchmarks.md`, 880b43b, answers of 200 tokens.

    49.6 tokens a second and stream; 50.4 and 39.0 are of two gateways with twice as many streams.
    """
    tokens_per_s = streams * 49.6
    by_rule = OWN_RATIO + gateway_cores(tokens_per_s, tokens_per_s / 200)
    assert by_rule >= tokens_per_s * measured_us * 1e-6
    assert by_rule <= 2.5 * tokens_per_s * measured_us * 1e-6


def held_s(busy_ratio: float) -> float:
    """How long tokens wait in a gateway whose loop is so busy, after long."""
    pace = HoldPace(HoldBounds(0.0, limits.MAX_HOLD_S), 0.0, ThreadTimes(0.0))
    for turn in range(1, 50):
        pace.look(turn * WINDOW_S, ThreadTimes(turn * WINDOW_S * busy_ratio))
    return pace.hold_s


def test_gateway_as_full_as_allowed_holds_nothing_and_half_as_long_with_one_away() -> None:
    assert held_s(FILL_RATIO) == 0.0
    assert held_s(FILL_RATIO_ONE_AWAY) == pytest.approx(limits.MAX_HOLD_S / 2)


def test_page_has_what_one_gateway_takes() -> None:
    for answer in ANSWERS:
        tokens_per_s = (FILL_RATIO - OWN_RATIO) / (TOKEN_S + REQUEST_S / answer)
        row = f"| {answer:,} tokens | {tokens_per_s:,.0f} | {tokens_per_s / answer:,.0f} |"
        assert row in PAGE.splitlines()


def test_page_has_the_slices_of_a_gateway_and_the_gateways_of_a_fleet() -> None:
    for name, what in SCENARIOS.items():
        path = ROOT / "autoscaling" / "scenarios" / f"{name}.yaml"
        profile = CapacityProfile.model_validate(yaml.safe_load(path.read_text())["profile"])
        each = full_batch_tokens_per_s(profile.base_s, profile.per_sequence_s, profile.max_num_seqs)
        slices = (FILL_RATIO - OWN_RATIO) / gateway_cores(each, each / ASSUMED_OUTPUT_TOKENS)
        fleets = (needed_gateways([engines(count, count * each)]).number for count in (4, 16, 64))
        cells = (name, what, f"{each:,.0f}", f"{slices:.1f}", *map(str, fleets))
        assert f"| {' | '.join(cells)} |" in PAGE.splitlines()
