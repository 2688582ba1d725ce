"""Stops processes for a share of the time or all of it.

Owns the stopping and continuing of processes, and that none is left stopped. Does not own which
processes these are: it asks again and again, so that new ones are found too.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

import psutil

logger = logging.getLogger(__name__)

# How long a slowed process stands still at a time. Longer than the 0.1 s that a paced engine makes
# up for in a burst, or it would not be slowed at all; shorter than any heartbeat's patience (1 s).
STOP_S = 0.2
# How often new processes are searched. A search takes some 20 ms on a machine of many processes.
_LOOK_EVERY_S = 1.0


class Throttle:
    """Gives processes 1/`factor` of the time, or with `None` none, for `for_s` seconds.

    `find` is called in a thread of its own. A process that is gone is passed over; one that appears
    later is treated like the others. A context manager; at the end every process it stopped runs.
    """

    def __init__(
        self, find: Callable[[], Iterable[psutil.Process]], factor: float | None, for_s: float
    ) -> None:
        self.factor = factor
        self._find = find
        self._for_s = for_s
        self._ends_at_s = float("inf")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begins; returns at once."""
        self._ends_at_s = time.monotonic() + self._for_s
        self._thread.start()

    def stop(self) -> None:
        """Ends it early; then every process that it stopped runs or is gone. Idempotent."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; returns whether it came in time."""
        return self._is_over.wait(timeout_s)

    @property
    def left_s(self) -> float | None:
        """The seconds until the end, `None` when it is over."""
        if self._is_over.is_set():
            return None
        return max(0.0, self._ends_at_s - time.monotonic())

    def _run(self) -> None:
        # By process and not by its id, which may be given again.
        stopped: set[psutil.Process] = set()
        try:
            while (left_s := self._ends_at_s - time.monotonic()) > 0:
                stopped.update(self._find())
                _suspend(stopped)
                if self._turn(stopped, min(left_s, _LOOK_EVERY_S)):
                    return
        except Exception:
            # Ends it early, which the user sees, rather than leaving processes stopped.
            logger.exception("throttle_failed")
        finally:
            _resume(stopped)
            self._is_over.set()

    def _turn(self, processes: Iterable[psutil.Process], for_s: float) -> bool:
        """Runs until the next search, with all processes stopped first; returns whether to end."""
        if self.factor is None:
            return self._is_over.wait(for_s)
        until_s = time.monotonic() + for_s
        while True:
            if self._is_over.wait(STOP_S):
                return True
            _resume(processes)
            if self._is_over.wait(STOP_S / (self.factor - 1)):
                return True
            if time.monotonic() >= until_s:
                return False
            _suspend(processes)


def _suspend(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def _resume(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
