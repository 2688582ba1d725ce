"""The Ray actor around an engine host. One per slice replica, on the first host of its slice."""

import asyncio
import logging
import os
import signal
from dataclasses import dataclass
from typing import Any

import ray

from serving.domain.slice_lifecycle import LoadStage
from serving.engine.end_signals import EndSignals
from serving.engine.host import EngineHost, start_engine
from serving.engine.spec import EngineSpec
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import ProgramsMoved
from serving.telemetry.process_log import log_as_actor

logger = logging.getLogger(__name__)

# Between admission and an engine a request is rendered and tokenized: milliseconds on a gateway
# that keeps up, and one that does not refuses requests before it is late by this much.
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class HostReport:
    """The report of a ready engine: its id and its link's address."""

    engine_id: str
    address: tuple[str, int]


class EngineHostActor:
    """Runs an engine host as an async actor; only its slice replica calls its methods."""

    def __init__(self, spec: EngineSpec, secret: bytes) -> None:
        log_as_actor(spec.log_style)
        self._spec = spec
        self._secret = secret
        self._host: EngineHost | None = None
        self._stages: asyncio.Queue[LoadStage] = asyncio.Queue()  # a few, once each
        self._end_signals: EndSignals | None = None

    async def start(self) -> HostReport:
        """Starts engine and link; returns when requests can come.

        Raises:
            ValueError: the engine refuses its arguments.
            EngineDiedError: it failed while starting.
        """
        self._end_signals = EndSignals(self._on_end_signal)
        engine = await start_engine(self._spec, self._stages.put_nowait)
        self._host = EngineHost(self._spec, engine, self._secret)
        loopback = self._spec.listens_on_loopback
        address = await self._host.listen(
            "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        )
        return HostReport(self._host.engine_id, address)

    def _on_end_signal(self, number: signal.Signals) -> None:
        reason = f"engine host got {number.name}"
        logger.warning("engine_host_told_to_end signal=%s", number.name)
        if self._host is None:
            # Nothing is in flight, and a start of minutes is not waited for.
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._host.end(reason)

    async def next_stage(self) -> LoadStage:
        """Waits for the next stage of loading that the engine reports, for ever if none comes."""
        return await self._stages.get()

    async def wait_died(self) -> str:
        """Waits until the engine is gone, and returns the reason."""
        if self._host is None:
            raise EngineDiedError("not started")
        return await self._host.wait_died()

    async def status(self) -> dict[str, Any]:
        """Returns requests, gateways and processes; raises `EngineDiedError` without an engine."""
        if self._host is None:
            raise EngineDiedError("not started")
        self._host.ensure_alive()
        return {
            "num_requests": self._host.server.num_requests,
            "gateway_ids": sorted(self._host.server.gateway_ids),
            "process_ids": list(getattr(self._host.engine, "process_ids", [])),
        }

    async def drain(self, reason: str, grace_s: float, stay_s: float = 0.0) -> None:
        """Asks the gateways to take their requests elsewhere, and waits until they have.

        Requests that other engines can take go within `grace_s`. It waits `stay_s`, if that is
        longer, for those that no other engine can take. With a `stay_s` it also waits a moment for
        requests that gateways had admitted, and not sent yet, when they were notified.
        """
        if self._host is None:
            return
        server = self._host.server
        server.drain(reason, grace_s)
        clock = asyncio.get_running_loop().time
        settled_s, deadline_s = clock() + min(_SETTLE_S, stay_s), clock() + max(grace_s, stay_s)
        # A drain is rare and the link server's table has no event to wait for.
        while clock() < deadline_s and (  # noqa: ASYNC110
            server.num_requests or (server.gateway_ids and clock() < settled_s)
        ):
            await asyncio.sleep(0.02)

    async def note_programs(self, moved: ProgramsMoved) -> None:
        """Notes the moves of the engine's programs so far, to be reported with its stats."""
        if self._host is not None:
            self._host.server.programs_moved = moved

    async def close(self) -> None:
        """Ends link and engine."""
        if self._end_signals is not None:
            self._end_signals.close()
        if self._host is not None:
            await self._host.close()
