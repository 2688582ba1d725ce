"""An event loop whose clock jumps to the next timer instead of waiting for it.

Durations on it are exact, so a timetable can be asserted without a stopwatch.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    now_s = 0.0

    # `Any`: typeshed's types of a selector's keys and events are private to it.
    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                msg = "nothing is left that could ever wake this loop"
                raise RuntimeError(msg)
            self.now_s += max(timeout, 0)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The loop; its clock starts at 0 s."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run_simulated(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` to its end on a clock that starts at 0 s."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main)
