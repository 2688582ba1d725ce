"""An engine's processes tell their host what they compile, and that a worker has ended."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from serving.engine.worker_reports import (
    REPORTS_VARIABLE,
    WorkerReports,
    report_compiled,
    report_compiling,
    report_worker_ended,
)

_WORKER = """
from serving.engine.worker_reports import report_compiling, report_worker_ended
report_compiling("jit(step fn)")
report_worker_ended("worker 1 on Ray node abc ended")
"""


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Heard:
    reports: WorkerReports
    clock: Clock
    ended: list[str] = field(default_factory=list)

    def compiling(self, since_s: float) -> str | None:
        self.reports.read()
        return self.reports.compiling(since_s)


@pytest_asyncio.fixture
async def heard() -> Iterator[Heard]:  # type: ignore[misc] # a generator, though asynchronous
    clock = Clock()
    heard = Heard(WorkerReports(clock), clock)
    heard.reports.on_worker_ended = heard.ended.append
    yield heard  # type: ignore[misc]
    heard.reports.close()
    heard.reports.close()
    assert REPORTS_VARIABLE not in os.environ


async def test_program_is_compiled_until_it_is_said_to_be_done(heard: Heard) -> None:
    assert heard.compiling(0.0) is None
    report_compiling("jit(sample)")
    assert heard.compiling(heard.clock.now_s + 1.0) == "jit(sample)"
    report_compiled("jit(sample)")
    # Within a check that began before it was done, and not within the next.
    assert heard.compiling(heard.clock.now_s - 1.0) == "jit(sample)"
    assert heard.compiling(heard.clock.now_s + 1.0) is None


async def test_one_of_two_programs_goes_on(heard: Heard) -> None:
    report_compiling("jit(sample)")
    report_compiling("jit(gather)")
    report_compiled("jit(sample)")
    assert heard.compiling(heard.clock.now_s + 1.0) == "jit(gather)"


async def test_reports_of_a_process_below_arrive(heard: Heard) -> None:
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", _WORKER], check=True)
    assert heard.compiling(heard.clock.now_s + 1.0) == "jit(step fn)"
    assert heard.ended == ["worker 1 on Ray node abc ended"]


async def test_more_than_is_read_at_once_arrives_whole(heard: Heard) -> None:
    reasons = [f"worker {number} ended " + "x" * 300 for number in range(40)]
    for reason in reasons:
        report_worker_ended(reason)
    heard.reports.read()
    assert heard.ended == reasons


async def test_report_is_one_line_whatever_it_says(heard: Heard) -> None:
    report_worker_ended("first\nsecond é")
    heard.reports.read()
    assert heard.ended == ["first second ?"]


def test_nobody_who_listens_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    report_compiling("jit(sample)")
    monkeypatch.setenv(REPORTS_VARIABLE, "/nowhere/at/all")
    report_worker_ended("worker 1 ended")
