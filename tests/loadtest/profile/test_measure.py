"""The profile of a slice whose law is known, from runs as the load test would record them."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.histogram import bucket_of
from loadtest.profile.measure import (
    ClosedLoad,
    OpenLoad,
    ProfileFailedError,
    ProfileObjective,
    RequestLengths,
    Subject,
    describe_source,
    load_seconds,
    measure_slice,
    slices_of,
)
from loadtest.recorder import RECORDS_FILE
from loadtest.records import ClientSample, RequestRecord, RunEnd, RunStart, encode
from loadtest.report.outputs import make_scorecard
from loadtest.scorecard.measure import Scorecard
from loadtest.scorecard.slo import GoodputLimits, ServiceLevel
from serving.domain.capacity.slice_profile import CapacityProfile

TRUE = CapacityProfile(
    model="m",
    engine="paced",
    base_s=0.02,
    per_sequence_s=0.0005,
    per_prompt_token_s=0.0001,
    max_num_seqs=256,
    ttft_floor_s=0.03,
    measured_on="2026-11-21",
    source="made up",
)
OBJECTIVE = ProfileObjective(ttft_s=3.0, tpot_s=0.1)
LENGTHS = RequestLengths(512, 128)
SECONDS = 40.0


class LawBench:
    """A `Bench` whose slices obey the law in steady state; beyond it every answer is too slow."""

    def __init__(self, folder: Path, num_slices: int, num_failing: int = 0) -> None:
        self._folder = folder
        self._num_slices = num_slices
        self._num_failing = num_failing
        self._numbers = itertools.count()
        self.loads: list[ClosedLoad | OpenLoad] = []

    def run(self, load: ClosedLoad | OpenLoad) -> Scorecard:
        self.loads.append(load)
        rate, step_s = self._steady(load)
        out_dir = self._folder / str(next(self._numbers))
        out_dir.mkdir()
        lines = [
            RunStart(0.0, "u", SECONDS, 0.0, 1, 1, None, {}),
            *self._requests(load, rate, step_s),
        ]
        lines += [
            ClientSample(float(s), 0, 0.1, 0.001, {bucket_of(0.001): 9}, 1, 1, 1) for s in range(40)
        ]
        lines.append(RunEnd(SECONDS + 60))
        (out_dir / RECORDS_FILE).write_bytes(b"".join(map(encode, lines)))
        level = ServiceLevel(goodput=GoodputLimits(ttft_s=3.0, tpot_s=0.1))
        return make_scorecard(out_dir, level)

    def _steady(self, load: ClosedLoad | OpenLoad) -> tuple[float, float]:
        """Requests per second of all slices, and the step."""
        lengths = load.lengths
        if isinstance(load, OpenLoad):
            each = load.requests_per_s / self._num_slices
            return load.requests_per_s, min(
                TRUE.step_s(each, lengths.input_tokens, lengths.output_tokens), 9.0
            )
        running = load.num_users / self._num_slices
        # A user's answer takes `output` steps; a step holds the prompts of those that begin in it.
        prompts_s = running / lengths.output_tokens * lengths.input_tokens * TRUE.per_prompt_token_s
        step_s = TRUE.base_s + running * TRUE.per_sequence_s + prompts_s
        return load.num_users / (step_s * lengths.output_tokens), step_s

    def _requests(
        self, load: ClosedLoad | OpenLoad, rate: float, step_s: float
    ) -> list[RequestRecord]:
        lengths = load.lengths
        made = []
        for number in range(math.floor(rate * SECONDS)):
            # So that as much is in flight before the window as after it.
            at_s = number / rate
            first_s = at_s + TRUE.ttft_floor_s + step_s
            last_s = first_s + (lengths.output_tokens - 1) * step_s
            made.append(
                RequestRecord(
                    request_id=f"r{number}", worker=0, model="m", api="completions",
                    scheduled_s=at_s, sent_s=at_s, first_s=first_s, last_s=last_s, ended_s=last_s,
                    planned_input_tokens=lengths.input_tokens,
                    planned_output_tokens=lengths.output_tokens,
                    error="http_5xx" if number < self._num_failing else None,
                    input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens,
                    num_chunks=lengths.output_tokens, gap_counts={}, longest_gap_s=step_s,
                    longest_gap_at_s=first_s, finish_reason="length",
                )
            )  # fmt: skip
        return made


def subject(num_slices: int) -> Subject:
    return Subject("m", "paced", num_slices, "v6e", "2x4", 12.0, 256)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_law_and_rate_of_one_slice_are_found(tmp_path: Path, num_slices: int) -> None:
    said: list[str] = []
    profile, measured = measure_slice(
        LawBench(tmp_path, num_slices), subject(num_slices), OBJECTIVE, LENGTHS,
        most_users=64, tolerance=0.1, show=said.append,
    )  # fmt: skip
    true_rate = TRUE.max_requests_per_s(512, 128, 0.1)
    # Throughput at the edges of a window of 40 s is what is left of the error.
    assert profile.base_s == pytest.approx(TRUE.base_s, rel=0.15)
    assert measured.predicted_per_s == pytest.approx(true_rate, rel=0.2)
    assert measured.sustained_per_s is not None
    assert true_rate / 1.2 <= measured.sustained_per_s <= true_rate * 1.01
    assert profile.load_s == 12.0
    assert (profile.generation, profile.topology) == ("v6e", "2x4")
    assert "requests/s sustained" in describe_source(OBJECTIVE, LENGTHS, measured)
    assert len(said) > 10


def test_engines_that_share_a_slice_are_measured_together(tmp_path: Path) -> None:
    """Four engines on each of two slices, each by the law: a slice carries what four carry."""
    shared = replace(subject(2), num_engines=4)
    profile, measured = measure_slice(
        LawBench(tmp_path, 8), shared, OBJECTIVE, LENGTHS,
        most_users=64, tolerance=0.1, show=lambda _line: None,
    )  # fmt: skip
    true_rate = 4 * TRUE.max_requests_per_s(512, 128, 0.1)
    assert (profile.num_engines, profile.max_num_seqs) == (4, 4 * 256)
    assert profile.base_s == pytest.approx(TRUE.base_s, rel=0.15)
    assert profile.per_sequence_s == pytest.approx(TRUE.per_sequence_s / 4, rel=0.2)
    assert measured.predicted_per_s == pytest.approx(true_rate, rel=0.2)
    assert measured.sustained_per_s is not None
    assert true_rate / 1.2 <= measured.sustained_per_s <= true_rate * 1.01


def test_server_that_fails_requests_is_not_profiled(tmp_path: Path) -> None:
    bench = LawBench(tmp_path, 1, num_failing=1)
    with pytest.raises(ProfileFailedError, match=r"1 of \d+ requests failed"):
        measure_slice(
            bench, subject(1), OBJECTIVE, LENGTHS, most_users=4, tolerance=0.1, show=print
        )
    assert len(bench.loads) == 1


def test_objective_below_an_idle_step_is_out_of_reach(tmp_path: Path) -> None:
    with pytest.raises(ProfileFailedError, match="out of reach"):
        measure_slice(
            LawBench(tmp_path, 1), subject(1), ProfileObjective(3.0, 0.01), LENGTHS,
            most_users=64, tolerance=0.1, show=lambda _line: None,
        )  # fmt: skip


def test_what_the_platform_says_of_its_slices_is_taken_over() -> None:
    history = [{"state": "requested", "for_s": 99}, {"state": "probing", "for_s": 2}]
    ready = {
        "model": "m",
        "state": "ready",
        "history": [*history, {"state": "loading", "for_s": 5}],
    }
    fleet = {
        "slices": [ready, {"model": "other", "state": "ready"}, {"model": "m", "state": "gone"}]
    }
    assert slices_of(fleet, "m") == [ready]
    assert load_seconds(slices_of(fleet, "m")) == 7
    assert slices_of(None, "m") == []
    assert load_seconds([]) == 0.0
