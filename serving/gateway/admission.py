"""Who is let in to a served model: before anything is promised to a client.

Owns the refusals at the door and the wait there. Does not own the door, nor what may be entered.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.config.application import GatewayConfig
from serving.domain.errors import GatewayBehindError, OverloadedError
from serving.gateway.door import Door
from serving.gateway.telemetry.request_metrics import ARRIVAL


@dataclass(frozen=True, slots=True)
class Inside:
    """What is known of the requests that have been let in, at this moment.

    `behind_s` is how late the gateway is with the tokens it has; `num_waiting` are the requests
    that wait inside for an engine.
    """

    behind_s: float
    num_waiting: int


class Admission:
    """The rules of one model at one gateway."""

    def __init__(self, model: str, gateway: GatewayConfig, door: Door) -> None:
        self._model = model
        self._gateway = gateway
        self._door = door

    async def admit(self, inside: Inside, can_enter: Callable[[], bool]) -> None:
        """Waits until `can_enter`, which says that an engine takes requests.

        Raises:
            GatewayBehindError: this gateway does not keep up with the tokens it has.
            OverloadedError: too many requests wait already.
            NoEngineInTimeError: none came within the request deadline.
        """
        if inside.behind_s > self._gateway.max_behind_s:
            self._door.turn_away()
            raise GatewayBehindError(self._model, inside.behind_s)
        if can_enter():
            return
        waiting = inside.num_waiting + self._door.num_waiting
        if waiting >= self._gateway.max_waiting_requests:
            self._door.turn_away()
            raise OverloadedError(self._model, waiting, self._door.retry_after_s)
        began_at_s = time.monotonic()
        arrival = ARRIVAL.get()
        trace = None if arrival is None else arrival.trace
        if trace is not None:
            trace.waits_at_the_door()
        try:
            if not await self._door.wait(can_enter, self._gateway.request_deadline_s):
                raise self._door.no_engine_in_time()
        finally:
            if trace is not None:
                trace.is_let_in()
        if arrival is not None:
            arrival.waited_s += time.monotonic() - began_at_s
