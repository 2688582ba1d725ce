"""`make test`: every test but the long ones, in one process more than there are cores.

What starts Ray waits more than it computes, so the jobs below run side by side, the longest first;
whoever is done takes the next one. What a job has printed appears whole once it has ended, and the
last lines say how long each took. A job that takes far too long is interrupted, and says where it
stood.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tests.interrupts import heed_interrupts

ROOT = Path(__file__).resolve().parents[1]
TESTS = Path("tests")
# Folders and files, the longest group first. What is named in no group is the last job, so that
# nothing is forgotten; what a group names is left out of the others.
GROUPS = (
    ("e2e",),
    ("e2e/test_slices.py", "kuberay"),
    ("engine", "gateway"),
    ("slices", "autoscaling"),
    ("loadtest",),
)
# Of the fast ones, what is a job of its own: half of their time, and most that imports vLLM.
FAST_GROUP = ("gateway", "engine", "link")
# The longest takes a third of it on a busy machine, and took 2,700 on one that was slow besides
# (2026-11-28). pytest ends a test that hangs; this is for what hangs outside of tests.
LIMIT_S = 5400.0
# What a job is told that is beyond it, one after the other. By the first pytest ends its fixtures,
# by the second it says where each thread stands.
LAST_WORDS_S = 60.0
_LAST_WORDS = (signal.SIGINT, signal.SIGABRT, signal.SIGKILL)


@dataclass(frozen=True)
class Job:
    """One run of pytest: the markers selected, and the paths taken and left out.

    Beyond `limit_s` it is ended, and has `last_words_s` for each thing it is told.
    """

    name: str
    markers: str
    paths: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    limit_s: float = LIMIT_S
    last_words_s: float = LAST_WORDS_S

    @property
    def command(self) -> list[str]:
        """What is run."""
        left_out = [f"--ignore={path}" for path in self.ignored]
        slowest = ("--durations=0", "--durations-min=5")
        asked = ["-q", *slowest, "-m", self.markers, *left_out, *self.paths]
        return [sys.executable, "-m", "pytest", *asked]


@dataclass(frozen=True)
class Ended:
    """A job that has ended. `code` is pytest's; 5 says that there was nothing to run."""

    job: Job
    code: int
    wall_s: float


def jobs(fast: str, starts: str) -> list[Job]:
    """All that is run, the longest first."""
    groups = [tuple(f"{TESTS / each}" for each in group) for group in GROUPS]
    named = {path for group in groups for path in group}
    apart = tuple(f"{TESTS / each}" for each in FAST_GROUP)
    started = [Job(" ".join(group), starts, group, _others(group, named)) for group in groups]
    return [
        *started[:2],
        Job("fast", fast, (f"{TESTS}",), apart),
        Job("the rest", starts, (f"{TESTS}",), tuple(sorted(named))),
        Job("fast " + " ".join(apart), fast, apart),
        *started[2:],
    ]


def _others(group: tuple[str, ...], named: set[str]) -> tuple[str, ...]:
    """What is named elsewhere and lies in this group."""
    return tuple(sorted(path for path in named - {*group} if path.startswith(group)))


class Queue:
    """Jobs, and what became of them. Threads take from it."""

    def __init__(self, waiting: list[Job]) -> None:
        self._waiting = deque(waiting)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.ended: list[Ended] = []

    def work(self) -> None:
        """Runs one job after the other until none is left."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            self._run(job)

    def _run(self, job: Job) -> None:
        begun_s = time.monotonic()
        with tempfile.TemporaryFile("w+") as said:
            run = subprocess.Popen(
                job.command,
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=heed_interrupts,
            )
            self._running.add(run)
            code = _wait(run, job)
            self._running.discard(run)
            said.seek(0)
            text = said.read()
        with self._lock:
            self.ended.append(Ended(job, code, time.monotonic() - begun_s))
            print(f"==== {job.name}\n{text}", flush=True)

    def interrupt(self) -> None:
        """Begins no more jobs, and ends those that run as Ctrl-C does: with what they started."""
        self._waiting.clear()
        for run in tuple(self._running):
            run.send_signal(signal.SIGINT)


def _wait(run: "subprocess.Popen[str]", job: Job) -> int:
    """Waits for its end; beyond the job's limit it is brought about."""
    wait_s = job.limit_s
    for last_word in _LAST_WORDS:
        try:
            return run.wait(wait_s)
        except subprocess.TimeoutExpired:
            run.send_signal(last_word)
            wait_s = job.last_words_s
    return run.wait()


def main() -> None:
    """Ends with 1 if a job failed."""
    parser = argparse.ArgumentParser(prog="gate.py")
    parser.add_argument("--fast", required=True, help="the expression of markers of fast tests")
    parser.add_argument("--starts", required=True, help="that of tests that start something")
    options = parser.parse_args()
    queue = Queue(jobs(options.fast, options.starts))
    # One more than there are cores, because what starts Ray also waits.
    num_workers = 1 + max(2, os.cpu_count() or 1)
    workers = [threading.Thread(target=queue.work) for _ in range(num_workers)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: queue.interrupt())
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = 0
    for each in sorted(queue.ended, key=lambda each: -each.wall_s):
        is_well = each.code in (0, 5)
        failed |= not is_well
        word = "" if is_well else f"  failed ({each.code})"
        print(f"{each.wall_s:7.0f} s  {each.job.name}{word}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
