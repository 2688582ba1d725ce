"""Runs chaos in step with a run: reports the run's state to the runner once a second.

A thread of its own, as an action takes as long as it takes.
"""

import threading
import time
from collections.abc import Callable

from loadtest.chaos.resolution import RunLoad
from loadtest.chaos.runner import ChaosRunner, slices_in_fleet
from loadtest.records import EventRecord
from loadtest.run.fleet_watch import Fleet

_PERIOD_S = 0.5


class ChaosThread:
    """Runs from `start` to `stop`.

    `load` and `fleet` return the current state; `write` takes each event.
    """

    def __init__(
        self,
        runner: ChaosRunner,
        start_s: float,
        load: Callable[[], RunLoad],
        fleet: Callable[[], Fleet],
        write: Callable[[EventRecord], None],
    ) -> None:
        self._runner = runner
        self._start_s = start_s
        self._load = load
        self._fleet = fleet
        self._write = write
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def start(self) -> None:
        """The first events may be due at once."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the action that is being done is done; nothing more is begun."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            now_s = time.monotonic() - self._start_s
            if now_s < 0:
                continue
            slices = slices_in_fleet(self._fleet())
            for event in self._runner.tick(now_s, self._load(), slices):
                self._write(event)
