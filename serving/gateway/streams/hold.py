"""The one timer by which held tokens of a model are released, and how long it runs.

Used from one event loop, whose thread's times say how busy the gateway is.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from serving.gateway.streams.pace import HoldBounds, HoldPace, ThreadTimes

# Of the calling thread: nanoseconds on a core, nanoseconds in which it waited for one, and turns.
_SCHEDULED = Path("/proc/thread-self/schedstat")


def thread_times() -> ThreadTimes:
    """Returns the times of the calling thread so far.

    Where the kernel does not tell how long it waited for a core, that is 0.
    """
    computed_s = time.thread_time()
    try:
        waited_ns = int(_SCHEDULED.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return ThreadTimes(computed_s)
    return ThreadTimes(computed_s, waited_ns / 1e9)


class TokenHold:
    """Runs the timer for all streams of a model at one gateway, in all of its versions."""

    def __init__(
        self, bounds: HoldBounds, read_times: Callable[[], ThreadTimes] = thread_times
    ) -> None:
        """Makes a timer that does not run. `read_times` is called in the loop's thread."""
        self._can_hold = bounds.most_s > 0
        self._read_times = read_times
        self._pace = HoldPace(bounds, time.monotonic(), read_times())
        self._releases: dict[Callable[[], None], None] = {}
        self._timer: asyncio.Handle | None = None

    def present_s(self, now_s: float) -> float:
        """Returns how long tokens wait that come now (monotonic); 0 if they do not wait."""
        if self._can_hold and self._pace.is_due(now_s):
            self._pace.look(now_s, self._read_times())
        return self._pace.hold_s

    def arm(self, release: Callable[[], None], least_s: float = 0.0) -> None:
        """Calls `release` once, when the tokens that have waited longest are due.

        If nothing waits, that is in the next turn of the loop, or in `least_s`. All who asked are
        called together, so that what they write leaves together.
        """
        self._releases[release] = None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            delay_s = max(self._pace.hold_s, least_s)
            self._timer = (
                loop.call_later(delay_s, self._fire) if delay_s else loop.call_soon(self._fire)
            )

    def disarm(self, release: Callable[[], None]) -> None:
        """Forgets `release`; a no-op if it is not awaited."""
        self._releases.pop(release, None)
        if not self._releases and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        releases, self._releases = self._releases, {}
        for release in releases:
            release()
