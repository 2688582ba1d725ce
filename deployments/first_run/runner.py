"""Runs the stages of a first run one after the other, and writes what each found at once.

Owns the run's course: who is asked next, what is kept, and that the application ends with the run.
What may run after which failure is decided by `order`, what a stage finds by its own process.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deployments.first_run.application import ServedApplication, fleet_of, stop_application
from deployments.first_run.order import RULE_OF, RunStage, obstacle
from deployments.first_run.process import PROGRAM, run_stage_process
from deployments.first_run.record.evidence import MAX_FILE_BYTES, EvidenceFolder
from deployments.first_run.record.page import html_page, text_page
from deployments.first_run.results import (
    RunVerdict,
    StageOutcome,
    StageResult,
    failed,
    parse_result,
    result_json,
    verdict_on,
)

RUN_FILE, RESULT_FILE, LOG_FILE = "run.json", "result.json", "log.txt"
TEXT_PAGE, HTML_PAGE = "verdict.txt", "verdict.html"


class RunInterruptedError(Exception):
    """The run is told to end, by a signal. What there is is still written."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """What a run is to do. `patience` multiplies what a clock decides; see `StageContext`."""

    file: Path
    settings: Mapping[str, Any]
    stages: tuple[RunStage, ...]
    scratch: Path
    address: str | None = None
    reference: str | None = None
    patience: float = 1.0
    program: Sequence[str] = PROGRAM


@dataclass(slots=True)
class FirstRun:
    """One run. `say` is told each step as it happens."""

    order: RunOrder
    evidence: EvidenceFolder
    say: Callable[[str], None]
    results: dict[RunStage, StageResult] = field(default_factory=dict)
    text: str = ""  # the verdict, once there is one
    _faults: list[str] = field(default_factory=list)
    _applications: list[ServedApplication] = field(default_factory=list)
    _output: list[str] = field(default_factory=list)

    def run(self) -> RunVerdict:
        """Runs all stages, ends the application, and returns the verdict.

        It writes before it ends the application, because a pod that is told to end may not have
        the time for both.
        """
        self.evidence.write(RUN_FILE, json.dumps(self._description(), indent=2) + "\n")
        try:
            for stage in self.order.stages:
                self._run_stage(stage)
        except RunInterruptedError as interruption:
            self._faults.append(f"{interruption}")
        self._conclude()
        for application in self._applications:
            stop_application(application)
        self._keep_application_logs()
        return self._conclude()

    def _run_stage(self, stage: RunStage) -> None:
        self.say(f"{stage} ...")
        began = datetime.now(UTC).isoformat(timespec="seconds")
        began_s = time.monotonic()
        outcomes = {name: result.outcome for name, result in self.results.items()}
        application = self._applications[-1] if self._applications else None
        is_served = application is not None and fleet_of(application) is not None
        reason = obstacle(stage, outcomes, is_served=is_served)
        if reason is not None:
            result = StageResult(stage, StageOutcome.BLOCKED, reason)
        else:
            try:
                result = self._measure(stage)
            except RunInterruptedError as interruption:
                self._keep(stage, failed(stage, f"{interruption}"), began, began_s)
                raise
        self._keep(stage, result, began, began_s)

    def _measure(self, stage: RunStage) -> StageResult:
        deadline_s = RULE_OF[stage].deadline_s * self.order.patience
        told: list[StageResult] = []
        self._output.clear()

        def on_message(message: dict[str, Any]) -> None:
            if "file" in message:
                self.evidence.write(f"{stage}/{message['file']}", message["text"])
            elif "application" in message:
                self._applications.append(ServedApplication(**message["application"]))
            elif "result" in message:
                told.append(parse_result(message["result"]))

        def on_output(text: str) -> None:
            self._output.append(text)
            self._keep_output(stage)

        end = run_stage_process(
            self._request(stage, deadline_s),
            deadline_s,
            on_message,
            on_output,
            self.order.program,
        )
        return told[-1] if told else failed(stage, end.describe(deadline_s))

    def _request(self, stage: RunStage, deadline_s: float) -> dict[str, Any]:
        application = self._applications[-1] if self._applications else None
        return {
            "stage": stage.value,
            "file": str(self.order.file),
            "settings": dict(self.order.settings),
            "scratch": str(self.order.scratch),
            # It stops by itself a moment before it would be stopped, and says why.
            "deadline_s": deadline_s * 0.95,
            "patience": self.order.patience,
            "address": self.order.address,
            "reference": self.order.reference,
            "application": None if application is None else _fields(application),
            "earlier": {name.value: result_json(found) for name, found in self.results.items()},
        }

    def _keep(self, stage: RunStage, result: StageResult, began: str, began_s: float) -> None:
        result = replace(result, started_at=began, wall_s=round(time.monotonic() - began_s, 3))
        self.results[stage] = result
        text = json.dumps(result_json(result), indent=2) + "\n"
        self.evidence.write(f"{stage}/{RESULT_FILE}", text)
        if self._output:
            self._keep_output(stage)
            self._output.clear()
        self._keep_application_logs()
        self.say(f"{stage}: {result.outcome} ({result.wall_s:.0f} s) {result.reason}")

    def _keep_output(self, stage: RunStage) -> None:
        text = "".join(self._output)[-MAX_FILE_BYTES:]
        self._output[:] = [text]
        self.evidence.write(f"{stage}/{LOG_FILE}", text)

    def _keep_application_logs(self) -> None:
        for number, application in enumerate(self._applications, start=1):
            try:
                with open(application.log, "rb") as file:
                    file.seek(max(0, file.seek(0, 2) - MAX_FILE_BYTES))
                    text = file.read().decode(errors="replace")
            except OSError as error:
                text = f"no log: {error}\n"
            self.evidence.write(f"application-{number}.log", text)

    def _conclude(self) -> RunVerdict:
        results = list(self.results.values())
        missing = [stage for stage in self.order.stages if stage not in self.results]
        faults = [*self._faults, *self.evidence.faults]
        if missing:
            faults.append(f"not run: {', '.join(missing)}")
        verdict = verdict_on(results, faults)
        self.text = text_page(self._description(), verdict, results, faults)
        self.evidence.write(TEXT_PAGE, self.text)
        self.evidence.write(HTML_PAGE, html_page(self._description(), verdict, results, faults))
        self.evidence.archive()
        late = [fault for fault in self.evidence.faults if fault not in faults]
        return verdict_on(results, [*faults, *late])

    def _description(self) -> dict[str, Any]:
        return {
            "file": self.order.file.name,
            "stages": [stage.value for stage in self.order.stages],
            "patience": self.order.patience,
            "ray": self.order.address or "its own",
            "reference": self.order.reference,
        }


def _fields(application: ServedApplication) -> dict[str, Any]:
    return {name: getattr(application, name) for name in ServedApplication.__slots__}
