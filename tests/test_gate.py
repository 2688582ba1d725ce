"""The jobs of `make test`: none of the tests is forgotten, and none is run twice."""

import sys
import threading
import time
from pathlib import Path

from scripts.gate import Job, Queue, jobs

ROOT = Path(__file__).resolve().parents[1]


def runs(job: Job, path: str) -> bool:
    return path.startswith(job.paths) and not (job.ignored and path.startswith(job.ignored))


def test_every_test_that_starts_something_is_in_one_job() -> None:
    started = [job for job in jobs("fast", "starts", "waits") if job.markers == "starts"]
    assert len(started) > 3
    files = [f"{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for path in files:
        assert len([job.name for job in started if runs(job, path)]) == 1, path


def test_fast_tests_are_one_job_of_all_files() -> None:
    (fast,) = (job for job in jobs("fast", "starts", "waits") if job.markers == "fast")
    assert (fast.paths, fast.ignored) == (("tests",), ())


def test_jobs_name_only_what_is_there() -> None:
    for job in jobs("fast", "starts", "waits"):
        for path in (*job.paths, *job.ignored):
            assert (ROOT / path).exists(), path


class Endless(Job):
    """A job that says when it runs, and ends when it is interrupted."""

    @property
    def command(self) -> list[str]:
        program = (
            "import pathlib, sys, time\n"
            "try:\n"
            f"    pathlib.Path({self.paths[0]!r}).touch()\n"
            "    time.sleep(300)\n"
            "except KeyboardInterrupt:\n    sys.exit(2)"
        )
        return [sys.executable, "-c", program]


def test_interrupted_gate_ends_what_runs_and_begins_nothing(tmp_path: Path) -> None:
    marks = [tmp_path / "first", tmp_path / "second"]
    queue = Queue([Endless(mark.name, "", (f"{mark}",)) for mark in marks])
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
