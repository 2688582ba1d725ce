"""Supervises one run from plan to records: starts workers together, watches, ends, merges.

Owns the order of a run and its end, Ctrl-C included. Does not own what is sent (`worker`) nor what
is made of the records (`scorecard`).
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from loadtest.chaos.resolution import RunLoad
from loadtest.chaos.runner import ChaosRunner, slices_in_fleet
from loadtest.client.check_kind import CheckKind
from loadtest.errors import LoadTestError
from loadtest.histogram import added, quantile
from loadtest.recorder import RECORDS_FILE, RequestRecorder, answers_part, merge_parts, run_part
from loadtest.records import RunEnd, RunStart
from loadtest.run.control import Go, Progress, Ready, Stop
from loadtest.run.fleet_watch import FleetWatch
from loadtest.run.periodic import repeated
from loadtest.run.plan import RunPlan
from loadtest.run.worker_processes import WorkerProcesses

# A trace of ten million rows is read and planned in about this time on a slow core.
_READY_S = 300.0
# From the start message to the first request: every worker has it by then.
_HEAD_START_S = 0.5
_RECEIVE_S = 0.25
_STATUS_PERIOD_S = 2.0
_FLEET_PERIOD_S = 1.0
_CHAOS_PERIOD_S = 0.5
# After the drain's bound workers end by themselves, within their last write.
_GRACE_S = 30.0
INTERRUPTED = "interrupted"


class RunFailedError(Exception):
    """The run did not come about, or a worker broke. The message has the worker's own output."""


@dataclass(frozen=True, slots=True)
class RunParts:
    """The needs of a run beside its plan.

    `offsets_s` are the instants of the schedule, `None` for a closed loop; `chaos` is `None` for a
    run without; `show` takes a line of progress every few seconds.
    """

    out_dir: Path
    api_key: str | None
    offsets_s: Sequence[float] | None
    chaos: ChaosRunner | None
    show: Callable[[str], None]


def refuse_used_folder(out_dir: Path) -> None:
    """Makes the folder of a run.

    Raises:
        LoadTestError: there is a run in it already.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    if (out_dir / RECORDS_FILE).exists() or run_part(out_dir).exists():
        raise LoadTestError(f"out={out_dir} holds a run already; allowed: a new or empty folder")


def run_load(plan: RunPlan, parts: RunParts) -> str | None:
    """Does the run and merges its records in `out_dir`; returns why it was cut short, or `None`.

    `plan` and the prompts' file lie in `out_dir`. The first Ctrl-C ends the run in order, the
    second at once; both keep the records.

    Raises:
        RunFailedError: a worker did not become ready; nothing was sent.
    """
    with _interrupts() as interrupts:
        workers = WorkerProcesses(parts.out_dir, plan.num_workers)
        try:
            _await_ready(workers, plan.num_workers, interrupts)
        except RunFailedError as error:
            raise RunFailedError("; ".join([str(error), *workers.close()])) from None
        with RequestRecorder(run_part(parts.out_dir)) as recorder:
            reason = _Run(plan, parts, workers, recorder, interrupts).supervise()
    merge_parts(parts.out_dir)
    if plan.check == CheckKind.RECORDED:
        _collect_answers(plan, parts.out_dir)
    return reason


@dataclass(slots=True)
class _Interrupts:
    count: int = 0


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Counts the signals that ask for the end, instead of being torn out of what is being done."""
    interrupts = _Interrupts()

    def count(_signal: int, _frame: FrameType | None) -> None:
        interrupts.count += 1

    before = {
        signal_number: signal.signal(signal_number, count)
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupts
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _await_ready(workers: WorkerProcesses, num_workers: int, interrupts: _Interrupts) -> None:
    until_s = time.monotonic() + _READY_S
    num_ready = 0
    while num_ready < num_workers:
        num_ready += sum(isinstance(message, Ready) for _, message in workers.receive(_RECEIVE_S))
        if workers.num_open < num_workers:
            raise RunFailedError("a worker ended before the run began")
        if interrupts.count:
            raise RunFailedError(f"{INTERRUPTED} before the run began")
        if time.monotonic() > until_s:
            raise RunFailedError(f"{num_ready} of {num_workers} workers ready in {_READY_S:g} s")


@dataclass(slots=True)
class _Run:
    """The state of a run between its start and its end."""

    plan: RunPlan
    parts: RunParts
    workers: WorkerProcesses
    recorder: RequestRecorder
    interrupts: _Interrupts
    start_s: float = field(default_factory=lambda: time.monotonic() + _HEAD_START_S)
    progress: dict[int, Progress] = field(default_factory=dict)
    rate_per_s: float = 0.0

    def supervise(self) -> str | None:
        """Runs until no worker is left; returns why the run was cut short, or `None`."""
        self._write_start(until_s=self.plan.duration_s)
        self.workers.send(Go(self.start_s))
        fleet = FleetWatch(self.plan.url, self.parts.api_key, self.start_s, self.recorder.write)
        with ExitStack() as beside:
            beside.enter_context(repeated(fleet.sample, _FLEET_PERIOD_S, "fleet-watch"))
            if self.parts.chaos is not None:
                disturb = partial(self._disturb, self.parts.chaos, fleet)
                beside.enter_context(repeated(disturb, _CHAOS_PERIOD_S, "chaos"))
            reason = self._listen()
            failures = self.workers.close()
            ended_s = time.monotonic() - self.start_s
        reason = "; ".join(([reason] if reason else []) + failures) or None
        self.recorder.write(RunEnd(ended_s, reason))
        return reason

    def _disturb(self, chaos: ChaosRunner, fleet: FleetWatch) -> None:
        now_s = time.monotonic() - self.start_s
        if now_s >= 0:
            for event in chaos.tick(now_s, self._load(), slices_in_fleet(fleet.latest)):
                self.recorder.write(event)

    def _listen(self) -> str | None:
        plan = self.plan
        given_up_s = self.start_s + plan.duration_s + plan.drain_s + _GRACE_S
        shown_s, sent_before = self.start_s, 0
        stopped_s: float | None = None
        while self.workers.num_open:
            for number, message in self.workers.receive(_RECEIVE_S):
                if isinstance(message, Progress):
                    self.progress[number] = message
            now_s = time.monotonic()
            if now_s - shown_s >= _STATUS_PERIOD_S:
                self.rate_per_s = (self._num_sent - sent_before) / (now_s - shown_s)
                sent_before = self._num_sent
                self._show(now_s)
                shown_s = now_s
            if self.interrupts.count and stopped_s is None:
                stopped_s = now_s - self.start_s
                self.workers.send(Stop())
                # What was scheduled for later is not missing.
                self._write_start(until_s=min(stopped_s, plan.duration_s))
            if self.interrupts.count > 1:
                break
            if now_s > given_up_s:
                return f"{self.workers.num_open} workers did not end in time and were killed"
        return None if stopped_s is None else INTERRUPTED

    def _write_start(self, until_s: float) -> None:
        offsets_s = self.parts.offsets_s
        self.recorder.write(
            RunStart(
                at_unix_s=time.time() + self.start_s - time.monotonic(),
                url=self.plan.url,
                duration_s=self.plan.duration_s,
                warmup_s=self.plan.warmup_s,
                num_workers=self.plan.num_workers,
                seed=self.plan.seed,
                num_scheduled=None
                if offsets_s is None
                else sum(offset_s < until_s for offset_s in offsets_s),
                plan=self.plan.model_dump(mode="json"),
            )
        )

    @property
    def _num_sent(self) -> int:
        return sum(report.num_sent for report in self.progress.values())

    def _load(self) -> RunLoad:
        progress = list(self.progress.values())
        return RunLoad(sum(report.num_in_flight for report in progress), self.rate_per_s)

    def _show(self, now_s: float) -> None:
        progress = list(self.progress.values())
        ttft_s = quantile(added(report.ttft_counts for report in progress), 0.5)
        parts = [
            f"{now_s - self.start_s:6.0f} s",
            f"sent {self._num_sent}",
            f"in flight {sum(report.num_in_flight for report in progress)}",
            f"failed {sum(report.num_failed for report in progress)}",
            "TTFT p50 " + ("-" if ttft_s is None else f"{ttft_s:.3f} s"),
        ]
        self.parts.show("  ".join(parts))


def _collect_answers(plan: RunPlan, out_dir: Path) -> None:
    """Puts the answers that workers recorded into one file, for a later run to compare with."""
    assert plan.answers_file is not None, "the plan was checked"
    parts = [answers_part(out_dir, worker) for worker in range(plan.num_workers)]
    recorded = [part for part in parts if part.exists()]
    if recorded:
        plan.answers_file.write_bytes(b"".join(part.read_bytes() for part in recorded))
    for part in recorded:
        part.unlink()
