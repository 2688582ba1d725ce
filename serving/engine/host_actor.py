"""The Ray actor around an engine host. One per engine, on the first host of its slice."""

import asyncio
import logging
import os
import signal
import uuid
from dataclasses import dataclass
from typing import Any

import ray

from serving.config.slice_settings import DRAIN_GRACE_S
from serving.domain.slice_lifecycle import LoadStage
from serving.engine.end_signals import EndSignals
from serving.engine.host import EngineHost, start_engine
from serving.engine.spec import EngineSpec
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import ProgramsMoved
from serving.ownership.control_server import EngineControlServer
from serving.ownership.group import remove_group
from serving.ownership.lease import EngineLease
from serving.telemetry.process_log import log_as_actor

logger = logging.getLogger(__name__)

# Between admission and an engine a request is rendered and tokenized: milliseconds on a gateway
# that keeps up, and one that does not refuses requests before it is late by this much.
_SETTLE_S = 2.0
# An owner that has just made the host connects in less, and one whose engine has ended is gone in
# less.
OPEN_S = 60.0
# For the answer to the owner that ended it.
_EXIT_S = 0.5


@dataclass(frozen=True, slots=True)
class HostReport:
    """The report of a ready engine: its id and its link's address."""

    engine_id: str
    address: tuple[str, int]


class EngineHostActor:
    """Runs an engine host as a detached async actor.

    The replica that makes it calls `open` and `start`; all else goes over the control port
    (`ownership.control_server`), to whichever replica owns the engine then.
    """

    def __init__(self, spec: EngineSpec, secret: bytes, group_id: str | None) -> None:
        """Takes the placement group around it; `None` where nothing is reserved."""
        log_as_actor(spec.log_style)
        self._spec = spec
        self._secret = secret
        self._group_id = group_id
        self._engine_id = uuid.uuid4().hex[:12]
        self._ip = "127.0.0.1" if spec.listens_on_loopback else ray.util.get_node_ip_address()
        self._control: EngineControlServer | None = None
        self._host: EngineHost | None = None
        self._stages: asyncio.Queue[LoadStage | None] = asyncio.Queue()  # `None` ends them
        self._end_signals: EndSignals | None = None
        self._watch: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None

    async def open(self, owner: str) -> tuple[str, int]:
        """Opens the control port for its first owner, and returns the address."""
        self._end_signals = EndSignals(self._on_end_signal)
        lease = EngineLease(owner, self._spec.lease_s)
        # Until the owner has connected: a replica that ends before that leaves nothing.
        lease.leave(lease.number, asyncio.get_running_loop().time(), OPEN_S)
        self._control = EngineControlServer(
            self._engine_id,
            self._secret,
            self,
            lease,
            self._on_lease_run_out,
            self._spec.encryption,
        )
        return await self._control.listen(self._ip)

    async def start(self) -> HostReport:
        """Starts engine and link; returns when requests can come.

        Raises:
            ValueError: the engine refuses its arguments.
            EngineDiedError: it failed while starting.
        """
        try:
            engine = await start_engine(self._spec, self._stages.put_nowait)
        finally:
            self._stages.put_nowait(None)
        self._host = EngineHost(self._spec, engine, self._secret, self._engine_id)
        address = await self._host.listen(self._ip)
        self._watch = asyncio.create_task(self._watch_engine(self._host), name="watch-engine-end")
        return HostReport(self._engine_id, address)

    async def next_stage(self) -> LoadStage | None:
        """Waits for the next stage of loading that the engine reports; `None` once it is ready."""
        return await self._stages.get()

    # What the owner commands.

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

    async def drain(self, reason: str, grace_s: float, stay_s: float) -> None:
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

    def note_programs(self, moved: ProgramsMoved) -> None:
        """Notes the moves of the engine's programs so far, to be reported with its stats."""
        if self._host is not None:
            self._host.server.programs_moved = moved

    async def close(self) -> None:
        """Ends link and engine; and this process, where no placement group would."""
        if self._end_signals is not None:
            self._end_signals.close()
        if self._host is not None:
            await self._host.close()
        if self._group_id is None:
            asyncio.get_running_loop().call_later(_EXIT_S, os.kill, os.getpid(), signal.SIGKILL)

    # Ends that nobody commands.

    def _on_end_signal(self, number: signal.Signals) -> None:
        reason = f"engine host got {number.name}"
        logger.warning("engine_host_told_to_end signal=%s", number.name)
        if self._host is None:
            # Nothing is in flight, and a start of minutes is not waited for.
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._host.end(reason)

    async def _watch_engine(self, host: EngineHost) -> None:
        """Tells the owner that the engine has ended. Without an owner, gives the slice back."""
        reason = await host.wait_died()
        assert self._control is not None
        self._control.tell_lost(reason)
        # An owner removes the placement group by itself, which ends this process.
        await asyncio.sleep(_EXIT_S if self._group_id is None else OPEN_S)
        await self._give_back()

    def _on_lease_run_out(self, reason: str) -> None:
        self._releasing = asyncio.create_task(self._end_alone(reason), name="end-alone")

    async def _end_alone(self, reason: str) -> None:
        await self.drain(reason, DRAIN_GRACE_S, 0.0)
        await self.close()
        await self._give_back()

    async def _give_back(self) -> None:
        """Removes the placement group, and this process with it."""
        if self._group_id is not None:
            await asyncio.to_thread(remove_group, self._group_id)
        os.kill(os.getpid(), signal.SIGKILL)
