"""The jobs of `make test`: none of the tests is forgotten, and none is run twice."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts.gate import Job, Queue, jobs

ROOT = Path(__file__).resolve().parents[1]


def runs(job: Job, path: str) -> bool:
    return path.startswith(job.paths) and not (job.ignored and path.startswith(job.ignored))


@pytest.mark.parametrize(("markers", "num_jobs"), [("starts", 6), ("fast", 2)])
def test_every_test_is_in_one_job_of_its_kind(markers: str, num_jobs: int) -> None:
    of_kind = [job for job in jobs("fast", "starts") if job.markers == markers]
    assert len(of_kind) == num_jobs
    files = [f"{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for path in files:
        assert len([job.name for job in of_kind if runs(job, path)]) == 1, path


def test_jobs_name_only_what_is_there() -> None:
    for job in jobs("fast", "starts"):
        for path in (*job.paths, *job.ignored):
            assert (ROOT / path).exists(), path


ENDLESS = """
import faulthandler, pathlib, signal, sys, time, traceback
faulthandler.enable()
if sys.argv[2] == str(signal.SIGABRT.value):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
def sleep(seconds):
    time.sleep(seconds)
try:
    pathlib.Path(sys.argv[1]).touch()
    sleep(300)
except KeyboardInterrupt:
    traceback.print_exc()
    sys.exit(2)
"""


class Endless(Job):
    """Says by a file that it runs, and ends when it is interrupted, or not even then."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", ENDLESS, self.paths[0], self.markers]


@pytest.mark.parametrize(
    ("heeds", "code"),
    [(signal.SIGINT, 2), (signal.SIGABRT, -signal.SIGABRT)],
    ids=["hears", "hangs"],
)
def test_job_that_takes_too_long_says_where_it_stood_and_is_ended(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    heeds: signal.Signals,
    code: int,
) -> None:
    mark = f"{tmp_path / 'mark'}"
    late = Endless("late", f"{heeds:d}", (mark,), limit_s=3.0, last_words_s=1.0)
    queue = Queue([late])
    queue.work()
    assert [(each.job.name, each.code) for each in queue.ended] == [("late", code)]
    assert " in sleep" in capsys.readouterr().out


def test_interrupted_gate_ends_what_runs_and_begins_nothing(tmp_path: Path) -> None:
    marks = [tmp_path / "first", tmp_path / "second"]
    heeds = f"{signal.SIGINT:d}"
    queue = Queue([Endless(mark.name, heeds, (f"{mark}",)) for mark in marks])
    worker = threading.Thread(target=queue.work)
    worker.start()
    deadline_s = time.monotonic() + 60
    while not marks[0].exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    queue.interrupt()
    worker.join(60)
    assert not worker.is_alive()
    assert [(each.job.name, each.code) for each in queue.ended] == [("first", 2)]
    assert not marks[1].exists()
