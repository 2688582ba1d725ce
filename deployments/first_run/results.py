"""Defines what a stage found, and judges it. Pure."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass


class StageOutcome(StrEnum):
    """What came of a stage."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # it has no meaning here, and the reason says why
    BLOCKED = "blocked"  # something that it needs had failed


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Measurement:
    """One thing that was measured. `is_met` of `None`: recorded, without an expectation."""

    what: str
    expected: str
    measured: str
    is_met: bool | None = None


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class StageResult:
    """The result of one stage.

    `facts` is JSON for programs. `wall_s` counts from the start of the stage; `started_at` is its
    wall-clock time in ISO 8601, empty for what never started.
    """

    stage: str
    outcome: StageOutcome
    reason: str
    measurements: tuple[Measurement, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    started_at: str = ""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on a whole run, with its sentence."""

    has_passed: bool
    reason: str


_RESULT = TypeAdapter(StageResult)


def judged(stage: str, measurements: Iterable[Measurement], **facts: Any) -> StageResult:
    """Returns the result of a stage that ran: failed if an expectation was not met."""
    found = tuple(measurements)
    missed = [each for each in found if each.is_met is False]
    if missed:
        reason = "; ".join(
            f"{each.what}: {each.measured} (expected: {each.expected})" for each in missed
        )
        return StageResult(stage, StageOutcome.FAILED, reason, found, facts)
    met = sum(each.is_met is True for each in found)
    return StageResult(stage, StageOutcome.PASSED, f"{met} expectations met", found, facts)


def skipped(stage: str, reason: str, **facts: Any) -> StageResult:
    """Returns the result of a stage that has no meaning here."""
    return StageResult(stage, StageOutcome.SKIPPED, reason, (), facts)


def failed(stage: str, reason: str, **facts: Any) -> StageResult:
    """Returns the result of a stage that could not measure anything."""
    return StageResult(stage, StageOutcome.FAILED, reason, (), facts)


def verdict_on(results: Iterable[StageResult], faults: Iterable[str] = ()) -> RunVerdict:
    """Returns the verdict on a run. `faults` are of the run itself: what could not be written."""
    known, broken = list(results), list(faults)
    bad = [each for each in known if each.outcome in (StageOutcome.FAILED, StageOutcome.BLOCKED)]
    counts = {outcome: sum(each.outcome == outcome for each in known) for outcome in StageOutcome}
    words = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    if not known:
        return RunVerdict(False, "no stage ran")  # noqa: FBT003 - the field's own value
    if not bad and not broken:
        return RunVerdict(True, words)  # noqa: FBT003
    first = f"{bad[0].stage}: {bad[0].reason}" if bad else broken[0]
    return RunVerdict(False, f"{words}; first fault: {first}")  # noqa: FBT003


def result_json(result: StageResult) -> dict[str, Any]:
    """Returns the result as JSON."""
    return asdict(result)


def parse_result(raw: object) -> StageResult:
    """Returns the result in parsed JSON.

    Raises:
        ValueError: it is no result of a stage.
    """
    try:
        return _RESULT.validate_python(raw)
    except ValidationError as error:
        raise ValueError(f"no result of a stage: {error.errors()[0]['msg']}") from error
