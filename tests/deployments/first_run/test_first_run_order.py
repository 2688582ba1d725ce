"""Which stages run, in which order, how long they may take, and what stops them."""

import pytest

from deployments.first_run.order import RULES, TOTAL_S, RunStage, chosen_stages, obstacle
from deployments.first_run.results import StageOutcome
from deployments.first_run.stages import PROGRAMS

PASSED, FAILED, BLOCKED = StageOutcome.PASSED, StageOutcome.FAILED, StageOutcome.BLOCKED


def test_deadlines_of_all_stages_sum_to_half_an_hour() -> None:
    assert sum(rule.deadline_s for rule in RULES) == TOTAL_S == 1800


def test_every_stage_has_one_rule_and_one_program_in_the_order_of_the_stages() -> None:
    assert [rule.stage for rule in RULES] == list(RunStage) == list(PROGRAMS)


def test_all_stages_run_unless_one_is_named() -> None:
    assert chosen_stages(None) == tuple(RunStage)


@pytest.mark.parametrize(
    ("only", "stages"),
    [
        (RunStage.DOCTOR, [RunStage.DOCTOR]),
        (RunStage.RESUME, [RunStage.COLD_START, RunStage.RESUME]),
        (RunStage.WARM_START, [RunStage.COLD_START, RunStage.WARM_START]),
        (RunStage.COLD_START, [RunStage.COLD_START]),
    ],
)
def test_one_stage_runs_with_what_it_needs_before_it(
    only: RunStage, stages: list[RunStage]
) -> None:
    assert chosen_stages(only) == tuple(stages)


def test_failed_probe_does_not_keep_the_engine_from_its_start() -> None:
    outcomes = {RunStage.DOCTOR: FAILED, RunStage.PROBE: FAILED}
    assert obstacle(RunStage.COLD_START, outcomes, is_served=False) is None


def test_stage_that_asks_the_application_needs_one_that_answers() -> None:
    outcomes = {RunStage.COLD_START: FAILED}
    assert obstacle(RunStage.CORRECTNESS, outcomes, is_served=True) is None
    reason = obstacle(RunStage.CORRECTNESS, outcomes, is_served=False)
    assert reason == "the application does not answer (cold_start failed)"


def test_application_that_is_gone_is_blamed_on_its_last_start() -> None:
    outcomes = {RunStage.COLD_START: PASSED, RunStage.WARM_START: FAILED}
    reason = obstacle(RunStage.RESUME, outcomes, is_served=False)
    assert reason == "the application does not answer (warm_start failed)"


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ({}, "cold_start has to pass first, and has not run"),
        ({RunStage.COLD_START: FAILED}, "cold_start has to pass first, and failed"),
        ({RunStage.COLD_START: BLOCKED}, "cold_start has to pass first, and blocked"),
        ({RunStage.COLD_START: PASSED}, None),
    ],
)
def test_second_start_needs_a_first_that_passed(
    outcomes: dict[RunStage, StageOutcome], words: str | None
) -> None:
    assert obstacle(RunStage.WARM_START, outcomes, is_served=False) == words


def test_hosts_are_asked_without_any_application() -> None:
    assert obstacle(RunStage.HOSTS, {RunStage.COLD_START: FAILED}, is_served=False) is None
