"""When requests that wait have waited too long. Used from one event loop only."""

import asyncio
import math
from collections.abc import Callable

from serving.gateway.dispatch.requests import InFlightRequest
from serving.gateway.dispatch.waiting import WaitingRequests


class Deadlines:
    """Watches the requests that wait for engines of one version: a timer, for the first of them."""

    def __init__(
        self,
        waiting: WaitingRequests,
        resume_deadline_s: float,
        *,
        has_engine: Callable[[], bool],
        on_over: Callable[[list[InFlightRequest]], None],
    ) -> None:
        """`on_over` gets those whose time is over, and has to take them out of the line.

        A stream that has begun waits for a ready engine for `resume_deadline_s`.
        """
        self._waiting = waiting
        self._resume_deadline_s = resume_deadline_s
        self._has_engine = has_engine
        self._on_over = on_over
        self._engineless_since_s = 0.0  # the loop's time at which the last ready one went
        self._timer: asyncio.TimerHandle | None = None

    def engine_went(self) -> None:
        """Notes that an engine is ready no more."""
        if not self._has_engine():
            self._engineless_since_s = asyncio.get_running_loop().time()
            self.arm()

    def arm(self) -> None:
        """Sets the timer, for the first whose time is over next."""
        self.stop()
        ends = [self._waiting.next_deadline_s()]
        since_s = self._waiting.resumed_since_s(of_suspects=self._has_engine())
        ends.append(None if since_s is None else self._given_up_at_s(since_s))
        at_s = min((each for each in ends if each is not None), default=math.inf)
        if at_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(at_s, self._expire)

    def stop(self) -> None:
        """Watches no more, until it is armed again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _given_up_at_s(self, since_s: float) -> float:
        """Returns when a stream ends that has begun, and waits since then for a ready engine.

        While one is ready, only suspects do, which wait for one without another suspect. All others
        wait for room then, no longer than they would in the engine's own line.
        """
        if not self._has_engine():
            since_s = max(since_s, self._engineless_since_s)
        return since_s + self._resume_deadline_s

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        over = self._waiting.due(now_s)
        for request in self._waiting.resumed():
            may_end = request.needs_isolation or not self._has_engine()
            if may_end and self._given_up_at_s(request.waiting_since_s or 0.0) <= now_s:
                over.append(request)
        self._on_over(over)
        self.arm()
