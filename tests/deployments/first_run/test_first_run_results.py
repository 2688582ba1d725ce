"""What a stage's measurements come to, and a run's stages."""

import json

import pytest

from deployments.first_run.results import (
    Measurement,
    StageOutcome,
    StageResult,
    failed,
    judged,
    parse_result,
    result_json,
    skipped,
    verdict_on,
)

MET = Measurement("duty", "above 0", "40 %", is_met=True)
MISSED = Measurement("late", "0", "3", is_met=False)
NOTED = Measurement("pause", "", "1.2 s")


def test_stage_passes_when_every_expectation_is_met() -> None:
    result = judged("exporter", [MET, NOTED])
    assert (result.outcome, result.reason) == (StageOutcome.PASSED, "1 expectations met")


def test_stage_fails_with_each_expectation_that_was_missed() -> None:
    result = judged("mixed_load", [MET, MISSED])
    assert result.outcome == StageOutcome.FAILED
    assert result.reason == "late: 3 (expected: 0)"


def test_result_survives_json() -> None:
    result = judged("mixed_load", [MET, MISSED, NOTED], ready_s=1.5)
    assert parse_result(json.loads(json.dumps(result_json(result)))) == result


@pytest.mark.parametrize("raw", [{}, {"stage": "x", "outcome": "fine", "reason": ""}, [1]])
def test_what_is_no_result_is_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="no result of a stage"):
        parse_result(raw)


def test_run_passes_with_stages_that_were_skipped() -> None:
    verdict = verdict_on([judged("doctor", [MET]), skipped("hbm", "no chips")])
    assert verdict.has_passed
    assert verdict.reason == "1 passed, 1 skipped"


@pytest.mark.parametrize(
    "bad",
    [
        failed("probe", "a chip is gone"),
        StageResult("probe", StageOutcome.BLOCKED, "a chip is gone"),
    ],
)
def test_run_fails_and_names_the_first_fault(bad: StageResult) -> None:
    verdict = verdict_on([judged("doctor", [MET]), bad, failed("hosts", "later")])
    assert not verdict.has_passed
    assert "first fault: probe: a chip is gone" in verdict.reason


def test_run_fails_when_its_evidence_could_not_be_written() -> None:
    verdict = verdict_on(
        [judged("doctor", [MET])], ["not in /x: log.txt (No space left on device)"]
    )
    assert not verdict.has_passed
    assert "No space left" in verdict.reason


def test_run_without_a_stage_has_not_passed() -> None:
    assert not verdict_on([]).has_passed
