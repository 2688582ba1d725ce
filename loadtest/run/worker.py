"""Runs one worker process: prepares its share, waits for the start, sends, drains.

It composes a worker; `worker_locustfile` runs it under Locust. Talks to the parent over a socket
(`control`). When the parent goes away the run ends, as nothing would read its result.
"""

import contextlib
import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gevent
import gevent.socket

from loadtest.client.body import BodyMaker
from loadtest.client.check_kind import CheckKind
from loadtest.client.expected_output import CheckAnswer, RecordedAnswers, check_paced
from loadtest.client.http_client import Client
from loadtest.client.prompt_source import PromptFile, ServerPrompts
from loadtest.client.sender import RunClock, Sender
from loadtest.histogram import bucket_of
from loadtest.recorder import RequestRecorder, answers_part, worker_part
from loadtest.records import RequestRecord
from loadtest.run.client_monitor import ClientMonitor, Counts
from loadtest.run.control import Go, Progress, Ready, Stop, encode_message, from_parent
from loadtest.run.dispatch import ClosedLoop, OpenLoop, conversations, share_of, user_begins_s
from loadtest.run.plan import PROMPTS_FILE, RunPlan
from loadtest.workload.build import Workload, build_workload

_PROGRESS_PERIOD_S = 1.0


def run_worker(
    plan: RunPlan,
    out_dir: Path,
    number: int,
    api_key: str | None,
    control: gevent.socket.socket,
    on_end: Callable[[RequestRecord], None],
) -> None:
    """Does the part of worker `number`. `on_end` gets each request once, when it is over.

    `control` is a gevent socket, so that waiting for the parent lets requests go on.

    Raises:
        LoadTestError: the plan cannot be carried out.
    """
    workload = build_workload(
        plan.workload, models=plan.models, duration_s=plan.duration_s, seed=plan.seed
    )
    found = PromptFile.model_validate_json((out_dir / PROMPTS_FILE).read_bytes())
    prompts = ServerPrompts.of(found)
    chance = random.Random(f"{plan.seed}/{number}")
    client = Client(plan.url, plan.limits, chance, api_key)
    checker, recording = _checker(plan)
    bodies = BodyMaker(prompts, wants_token_ids=checker is not None)
    lines = control.makefile("rwb", buffering=0)
    lines.write(encode_message(Ready()))
    go = lines.readline()
    if not go:
        return
    first = from_parent(go)
    if isinstance(first, Stop):
        return
    # What is here stays until the end: no collection need visit it again.
    gc.collect()
    gc.freeze()
    with RequestRecorder(worker_part(out_dir, number)) as recorder:
        tally = _Tally()

        def take(record: RequestRecord) -> None:
            recorder.write(record)
            tally.take(record)
            on_end(record)

        clock = RunClock(number, first.start_s)
        sender = Sender(client, bodies, checker, clock, take)

        def counts() -> Counts:
            return Counts(client.num_in_flight, sender.num_sent, client.num_token_events)

        monitor = ClientMonitor(number, first.start_s, counts, recorder.write)
        loop = _loop(plan, workload, sender, number, first)
        reporting = gevent.spawn(_report_progress, lines.write, tally, counts)
        try:
            _run_until_stopped(loop, lines.readline, first.start_s + plan.duration_s + plan.drain_s)
        finally:
            reporting.kill()
            monitor.stop()
            client.close()
    if recording is not None:
        recording.save(answers_part(out_dir, number))
    _report(lines.write, tally.progress(counts()))


def _checker(plan: RunPlan) -> tuple[CheckAnswer | None, RecordedAnswers | None]:
    """Returns the check of answers; if that is to record them, also where they are recorded."""
    if plan.check == CheckKind.NONE:
        return None, None
    if plan.check == CheckKind.PACED:
        return check_paced, None
    assert plan.answers_file is not None, "the plan was checked"
    if plan.answers_file.exists():
        return RecordedAnswers.load(plan.answers_file).check, None
    recording = RecordedAnswers()
    return recording.record, recording


class _Tally:
    """Adds up the records of this worker."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._ttft_counts: Counter[int] = Counter()

    def take(self, record: RequestRecord) -> None:
        self._num_failed += not record.is_ok
        if record.first_s is not None:
            self._ttft_counts[bucket_of(record.first_s - record.sent_s)] += 1

    def progress(self, counts: Counts) -> Progress:
        return Progress(
            counts.num_sent, counts.in_flight, self._num_failed, dict(self._ttft_counts)
        )


def _loop(
    plan: RunPlan, workload: Workload, sender: Sender, number: int, go: Go
) -> OpenLoop | ClosedLoop:
    end_s = go.start_s + plan.duration_s
    if workload.num_users is None:
        share = share_of(conversations(workload.requests), number, plan.num_workers)
        return OpenLoop(share, sender, go.start_s, end_s)
    begins_s = user_begins_s(
        workload.num_users, number, plan.num_workers, go.start_s, plan.warmup_s
    )
    return ClosedLoop(workload.closed_loop(number, plan.num_workers), sender, begins_s, end_s)


def _run_until_stopped(
    loop: OpenLoop | ClosedLoop, read_line: Callable[[], bytes], drained_s: float
) -> None:
    """Runs the loop to its drained end, or until the parent orders a stop or is gone."""

    def run() -> None:
        loop.run()
        loop.drain(drained_s)

    running = gevent.spawn(run)
    # Whatever comes after the start, a message or the end of the stream, is the end.
    listening = gevent.spawn(read_line)
    gevent.wait([running, listening], count=1)
    if not running.dead:
        running.kill()
        loop.drain(time.monotonic())
    listening.kill()
    running.get()


def _report_progress(
    write: Callable[[bytes], object], tally: _Tally, counts: Callable[[], Counts]
) -> None:
    while True:
        gevent.sleep(_PROGRESS_PERIOD_S)
        _report(write, tally.progress(counts()))


def _report(write: Callable[[bytes], object], progress: Progress) -> None:
    # A parent that is gone gets nothing; that it is gone ends the run elsewhere.
    with contextlib.suppress(OSError):
        write(encode_message(progress))
