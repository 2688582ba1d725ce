"""What a soak's samples and records come to, on runs that are made."""

import random
from dataclasses import replace

import msgspec
import pytest

from loadtest.histogram import bucket_of
from loadtest.records import ClientSample, RequestRecord, RunEnd, RunStart
from loadtest.scorecard.compare import Comparison
from loadtest.scorecard.stored_run import StoredRun

from .soak_analysis import KIB, MIB, Sample, compare_thirds, drifts, growth

RATE_PER_S = 10.0
DURATION_S = 300.0


def memory(*, leak: float = 0.0, early: float = 0.0, noise: float = 0.0) -> list[Sample]:
    """Samples each second: `leak` bytes per request, `early` by the end of the first half, steps of
    up to `noise` bytes that come and go."""
    chance = random.Random(1)
    samples, step = [], 0.0
    for at_s in range(600):
        if at_s % 25 == 0:
            step = chance.uniform(0, noise)
        grown = leak * RATE_PER_S * at_s + early * min(1.0, at_s / 300)
        samples.append(Sample(float(at_s), int(100 * MIB + grown + step)))
    return samples


def test_leak_shows_per_request() -> None:
    found = growth(memory(leak=8 * KIB), RATE_PER_S)
    assert found.slope == pytest.approx(8 * KIB, rel=0.01)
    assert found.is_shown_above(4 * KIB)
    assert not found.is_shown_within(4 * KIB)
    assert found.end_bytes > found.middle_bytes


def test_leak_shows_through_an_allocators_steps() -> None:
    found = growth(memory(leak=8 * KIB, noise=2 * MIB), RATE_PER_S)
    assert found.is_shown_above(4 * KIB)
    assert found.low < 8 * KIB < found.high


def test_warm_up_and_steps_are_no_leak() -> None:
    found = growth(memory(early=50 * MIB, noise=2 * MIB), RATE_PER_S)
    assert found.is_shown_within(4 * KIB)


def test_steps_too_large_for_the_run_leave_it_open() -> None:
    found = growth(memory(noise=100 * MIB), RATE_PER_S)
    assert not found.is_shown_above(4 * KIB)
    assert not found.is_shown_within(4 * KIB)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="10 samples in the second half; at least 20"):
        growth(memory()[:20], RATE_PER_S)


def answered(number: int, at_s: float, ttft_s: float) -> RequestRecord:
    last_s = at_s + ttft_s + 0.3
    return RequestRecord(
        request_id=f"r{number}", worker=0, model="paced", api="chat", scheduled_s=at_s, sent_s=at_s,
        first_s=at_s + ttft_s, last_s=last_s, ended_s=last_s, planned_input_tokens=100,
        planned_output_tokens=11, input_tokens=100, output_tokens=11, num_chunks=11,
        gap_counts={bucket_of(0.03): 10}, longest_gap_s=0.03, longest_gap_at_s=at_s + ttft_s,
        finish_reason="length",
    )  # fmt: skip


def a_run(ttft_at_start_s: float, ttft_at_end_s: float) -> StoredRun:
    """A warm-up of 30 s that is slow, then a TTFT that goes straight from one value to the other,
    10 % to either side."""
    chance = random.Random(1)
    requests = []
    for number in range(round(DURATION_S * RATE_PER_S)):
        at_s = number / RATE_PER_S
        share = max(0.0, (at_s - 30.0) / (DURATION_S - 30.0))
        ttft_s = ttft_at_start_s + share * (ttft_at_end_s - ttft_at_start_s)
        ttft_s *= chance.uniform(0.9, 1.1)
        requests.append(answered(number, at_s, 9.0 if at_s < 30.0 else ttft_s))
    start = RunStart(0.0, "http://server", DURATION_S, 30.0, 1, 1, len(requests), {})
    calm = ClientSample(0.0, 0, 0.2, 0.001, {bucket_of(0.0005): 190}, 4, 10, 500)
    client = tuple(msgspec.structs.replace(calm, at_s=float(at_s)) for at_s in range(300))
    return StoredRun(start, tuple(requests), client, (), (), RunEnd(DURATION_S))


def ttft_p50(comparison: Comparison) -> tuple[float | None, float | None]:
    (found,) = [each for each in comparison.differences if each.metric == "TTFT p50"]
    return found.a, found.b


def test_steady_latencies_do_not_drift() -> None:
    found = compare_thirds(a_run(0.1, 0.1), seed=1)
    assert found.invalid == ()
    assert ttft_p50(found) == (pytest.approx(0.1, rel=0.02), pytest.approx(0.1, rel=0.02))
    assert drifts(found, 0.25) == []


def test_rising_latency_drifts() -> None:
    found = compare_thirds(a_run(0.1, 0.2), seed=1)
    # The middle of each third, the warm-up left out.
    assert ttft_p50(found) == (pytest.approx(0.117, rel=0.02), pytest.approx(0.183, rel=0.02))
    assert {each.metric for each in drifts(found, 0.25)} == {"TTFT p50", "TTFT p95"}
    assert drifts(found, 0.8) == []


def test_falling_latency_is_no_drift() -> None:
    assert drifts(compare_thirds(a_run(0.2, 0.1), seed=1), 0.25) == []


def test_thirds_are_judged_as_whole_runs() -> None:
    run = a_run(0.1, 0.1)
    slow_client = tuple(msgspec.structs.replace(each, cpu_ratio=0.9) for each in run.client[200:])
    found = compare_thirds(replace(run, client=run.client[:200] + slow_client), seed=1)
    assert [words.split(":")[0] for words in found.invalid] == ["last third"]
