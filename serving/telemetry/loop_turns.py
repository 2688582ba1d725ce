"""Measures the longest turn of an event loop: how long it stood still for everybody else.

A timer that is due in a hundredth of a second comes as much later as one turn of the loop takes,
whatever the turn did: parse, compile, collect garbage, wait for a lock or for a core. Nothing has
to be marked. The CPU time of the loop's thread tells work from waiting.
"""

import asyncio
import time
from dataclasses import dataclass

# A turn may take this long unseen. Those that matter take 20 ms and more.
_TICK_S = 0.01
# The longest turn is that of the present window and of the one before.
_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class _Longest:
    """The longest turn of a window, and the most CPU time of one, in seconds."""

    turn_s: float = 0.0
    cpu_s: float = 0.0


_NONE = _Longest()


class LoopTurns:
    """Watches the loop that it is started on, until it is stopped. Costs a timer's turn per 10 ms.

    Used from that loop only.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._window_ends_s = 0.0
        self._cpu_s = 0.0  # at the last tick
        self._longest = self._longest_before = _NONE

    def start(self) -> None:
        """Begins to watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends_s = self._loop.time() + _WINDOW_S
        self._cpu_s = time.thread_time()
        self._await_next()

    def stop(self) -> None:
        """Ends the watch; a no-op without one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def longest_s(self) -> float:
        """The longest turn in seconds within the last 30 s to a minute; those below 10 ms are 0."""
        return max(self._longest.turn_s, self._longest_before.turn_s)

    @property
    def longest_cpu_s(self) -> float:
        """The most CPU time of one long turn in the same time, that of 10 ms before it included.

        Far less than `longest_s`, the loop has waited: the machine is short of cores.
        """
        return max(self._longest.cpu_s, self._longest_before.cpu_s)

    def _await_next(self) -> None:
        assert self._loop is not None
        self._due_s = self._loop.time() + _TICK_S
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        while now_s >= self._window_ends_s:
            self._longest_before, self._longest = self._longest, _NONE
            self._window_ends_s += _WINDOW_S
        late_s, cpu_before_s = now_s - self._due_s, self._cpu_s
        self._cpu_s = time.thread_time()
        if late_s >= _TICK_S:
            self._longest = _Longest(
                max(self._longest.turn_s, late_s),
                max(self._longest.cpu_s, self._cpu_s - cpu_before_s),
            )
        self._await_next()
