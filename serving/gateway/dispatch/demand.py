"""Tells engines what waits for room at this gateway: at once that something does, then at times."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from serving.gateway.dispatch.waiting import WaitingRequests
from serving.link.messages import RoomWanted

# How long the engines may go on with earlier numbers, while something waits.
_PERIOD_S = 0.05
# And where a tenant has begun to wait: until they know of it, its turn does not come.
_NEW_LINE_S = 0.005


class _Numbers(NamedTuple):
    """What engines hear of anew when it changes."""

    num_requests: int
    num_tokens: int
    num_lines: int
    is_before_lines: bool


class DemandTeller:
    """Sends what waits now through `tell`. Used from one event loop."""

    def __init__(
        self,
        waiting: WaitingRequests,
        tell: Callable[[RoomWanted], None],
        tpot_s: Callable[[], float | None],
    ) -> None:
        """`tpot_s` is what engines are to keep to, by the objectives as they are now."""
        self._waiting = waiting
        self._tell = tell
        self._tpot_s = tpot_s
        self._told = _Numbers(0, 0, 0, is_before_lines=False)
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Takes in that something may have changed."""
        now, told = self._numbers(), self._told
        if bool(now.num_requests) != bool(told.num_requests):
            self._send()
        elif now != told:
            # What goes before all lines gets places that nobody else may have.
            is_urgent = now.is_before_lines != told.is_before_lines
            is_new = now.num_lines > told.num_lines or is_urgent
            self._send_in(_NEW_LINE_S if is_new else _PERIOD_S)

    def now(self) -> RoomWanted:
        """Returns what there is to tell now."""
        return self._waiting.wanted(self._tpot_s())

    def stop(self) -> None:
        """Sends nothing any more, unless it looks again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _numbers(self) -> "_Numbers":
        waiting = self._waiting
        is_before_lines = waiting.work_before_lines > 0
        return _Numbers(len(waiting), waiting.num_tokens, waiting.num_lines, is_before_lines)

    def _send_in(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._send)

    def _send(self) -> None:
        self.stop()
        now = self._numbers()
        if now != self._told:
            self._told = now
            self._tell(self.now())
