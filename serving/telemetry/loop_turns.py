"""Measures the longest turn of an event loop: how long it stood still for everybody else.

A timer that is due in a hundredth of a second comes as much later as one turn of the loop takes,
whatever the turn did: parse, compile, collect garbage, wait for a lock. Nothing has to be marked.
"""

import asyncio

# A turn may take this long unseen. Those that matter take 20 ms and more.
_TICK_S = 0.01
# The longest turn is that of the present window and of the one before.
_WINDOW_S = 30.0


class LoopTurns:
    """Watches the loop that it is started on, until it is stopped. Costs a timer's turn per 10 ms.

    Used from that loop only.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._window_ends_s = 0.0
        self._longest_s = self._longest_before_s = 0.0

    def start(self) -> None:
        """Begins to watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends_s = self._loop.time() + _WINDOW_S
        self._await_next()

    def stop(self) -> None:
        """Ends the watch; a no-op without one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def longest_s(self) -> float:
        """The longest turn in seconds within the last 30 s to a minute; those below 10 ms are 0."""
        return max(self._longest_s, self._longest_before_s)

    def _await_next(self) -> None:
        assert self._loop is not None
        self._due_s = self._loop.time() + _TICK_S
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        while now_s >= self._window_ends_s:
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
            self._window_ends_s += _WINDOW_S
        late_s = now_s - self._due_s
        if late_s >= _TICK_S:
            self._longest_s = max(self._longest_s, late_s)
        self._await_next()
