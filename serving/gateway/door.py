"""The door of one model at one gateway: who waits in front of it until an engine takes requests.

Shared by all versions of the model, because a request that waits has no version yet. Owns those who
wait, the load that the model has seen, and when the next engine is expected. Does not own what is
inside (`fleet_core`), nor whether one more may wait (`admission`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.domain.errors import NoEngineInTimeError
from serving.gateway.telemetry.load_window import LoadMeter


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """How long a request waits for an engine, and how many engines it may take down."""

    request_deadline_s: float = 60.0
    max_engine_losses: int = 3
    retry_after_s: float = 30.0
    refused_retry_after_s: float = 1.0
    call_timeout_s: float = 30.0


class Door:
    """See the module. Used from one event loop only."""

    def __init__(self, model: str, limits: FleetLimits) -> None:
        self.meter = LoadMeter(time.monotonic())
        self._model = model
        self._limits = limits
        # Callers inside `wait`, in the order in which they came, and since when.
        self._waiting: dict[object, float] = {}
        self._engine_came = asyncio.Event()
        self._next_engine_at_s: float | None = None  # monotonic

    @property
    def num_waiting(self) -> int:
        """Callers inside `wait`."""
        return len(self._waiting)

    def first_since_s(self, otherwise_s: float) -> float:
        """Since when the first of them waits (monotonic)."""
        return next(iter(self._waiting.values()), otherwise_s)

    def open(self) -> None:
        """An engine has come: whoever waits looks again."""
        self._engine_came.set()

    async def wait(self, can_enter: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `can_enter`, which engines that come may change; `False`: not in time."""
        caller = object()
        self._waiting[caller] = time.monotonic()
        self.meter.knocked(time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                while not can_enter():
                    self._engine_came.clear()
                    await self._engine_came.wait()
        except TimeoutError:
            return False
        finally:
            del self._waiting[caller]
        self.meter.let_in(time.monotonic())
        return True

    def turn_away(self) -> None:
        """Counts a request that may not even wait: it is load all the same."""
        self.meter.knocked(time.monotonic())

    def expect_engine(self, in_s: float | None) -> None:
        """Takes in when the next engine is expected to be ready; `None`: nobody knows."""
        self._next_engine_at_s = None if in_s is None else time.monotonic() + in_s

    @property
    def retry_after_s(self) -> float:
        """When a refused client may try again: with the next engine, where one is expected."""
        if self._next_engine_at_s is None:
            return self._limits.retry_after_s
        in_s = self._next_engine_at_s - time.monotonic()
        return in_s if in_s > 0 else self._limits.retry_after_s

    def no_engine_in_time(self) -> NoEngineInTimeError:
        """The refusal of a request that waited its whole deadline."""
        return NoEngineInTimeError(self._model, self._limits.request_deadline_s, self.retry_after_s)
