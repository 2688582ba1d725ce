"""The control port of an engine host: one owner at a time commands the engine there.

A link (`serving.link`) without requests: the same proof of the cluster secret, the same heartbeat,
and calls. An open connection of the owner is its renewal of the lease, so that renewing and
claiming need neither Ray's head nor the directory. Owns the lease and who may call what. Does not
own the engine, nor what a command does to it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from serving.domain.limits import LinkEncryption
from serving.link.connection import HANDSHAKE_TIMEOUT_S
from serving.link.gateway_connection import ConnectionConfig, GatewayConnection
from serving.link.heartbeat import HeartbeatConfig
from serving.link.listener import LinkListener, engine_listener
from serving.link.messages import (
    Abort,
    Call,
    EngineLoad,
    EngineLost,
    EngineStats,
    ProgramsMoved,
    Reply,
    RoomWanted,
    TokenRequest,
)
from serving.ownership.lease import ClaimRefusedError, EngineLease

logger = logging.getLogger(__name__)

# Generous: an engine that starts may hold its host's event loop for seconds, and a lost owner
# costs nothing for the first hour.
CONTROL_HEARTBEAT = HeartbeatConfig(interval_s=1.0, timeout_s=10.0)
_MAX_BUFFERED_BYTES = 1024 * 1024
_CHECK_S = 1.0
_CLOSE_S = 1.0


class ClaimArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `claim`: the replica's life."""

    owner: str


class Claimed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to `claim`. `deed` is what the owner before had stored, empty before that."""

    number: int
    deed: bytes


class LeaveArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `leave`: how long another owner has to come."""

    within_s: float


class DrainArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `drain`; see `Commanded.drain`."""

    reason: str
    grace_s: float
    stay_s: float


class Commanded(Protocol):
    """The engine host behind the port."""

    async def status(self) -> dict[str, Any]:
        """Returns requests, gateways and processes, as JSON."""
        ...

    async def drain(self, reason: str, grace_s: float, stay_s: float) -> None:
        """Asks the gateways to take their requests elsewhere, and waits until they have."""
        ...

    def note_programs(self, moved: ProgramsMoved) -> None:
        """Notes the moves of the engine's programs so far."""

    async def close(self) -> None:
        """Ends link and engine."""
        ...


class EngineControlServer:
    """Serves the control port. `on_run_out` is called once, when no owner came in time."""

    def __init__(
        self,
        engine_id: str,
        secret: bytes,
        commanded: Commanded,
        lease: EngineLease,
        on_run_out: Callable[[str], None],
        encryption: LinkEncryption = LinkEncryption.AUTO,
    ) -> None:
        self._config = ConnectionConfig(
            engine_id, secret, CONTROL_HEARTBEAT, _MAX_BUFFERED_BYTES, HANDSHAKE_TIMEOUT_S
        )
        self._commanded = commanded
        self.lease = lease
        self._on_run_out = on_run_out
        self._deed = b""
        self._encryption = encryption
        self._listener: LinkListener | None = None
        self._connections: set[GatewayConnection] = set()
        self._numbers: dict[GatewayConnection, int] = {}  # of their claims
        self._calls: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._lost_reason: str | None = None

    async def listen(self, host: str) -> tuple[str, int]:
        """Serves on a free port of `host`; returns the address to connect to."""
        self._listener = engine_listener(self, self._config, self._encryption, host)
        await self._listener.listen(host, 0)
        self._watch = asyncio.create_task(self._watch_lease(), name="watch-lease")
        return self._listener.address

    def tell_lost(self, reason: str) -> None:
        """Tells whoever is connected, and who connects later, that the engine has ended."""
        if self.lease.is_over:
            # As its owner asked; it gets its answer.
            return
        self._lost_reason = reason
        self.lease.end()
        for connection in list(self._connections):
            if connection.is_open:
                connection.end(reason, farewell=EngineLost(reason))

    async def close(self) -> None:
        """Ends all connections and stops listening. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.end("the engine host closed")

    # What the connections call.

    def connected(self, connection: GatewayConnection) -> None:
        """Takes a connection that has proved nothing yet."""
        self._connections.add(connection)

    def opened(self, gateway: GatewayConnection) -> None:
        """Takes a peer that has proved itself; it owns nothing before it claims."""
        if self._lost_reason is not None:
            gateway.end(self._lost_reason, farewell=EngineLost(self._lost_reason))

    def ended(self, gateway: GatewayConnection, reason: str) -> None:
        """Notes that a peer has gone; the lease goes on without it, if it was the owner."""
        number = self._numbers.pop(gateway, None)
        if number is not None and self.lease.is_current(number):
            # An engine that is not ready is of no use to a successor.
            within_s = None if self._deed else min(self.lease.lease_s, _START_OVER_S)
            self._leave(number, within_s, reason)

    def disconnected(self, connection: GatewayConnection) -> None:
        """Forgets a connection, because its transport is gone."""
        self._connections.discard(connection)

    def submitted(self, gateway: GatewayConnection, request: TokenRequest) -> None:
        """Ends the connection: requests do not come here."""
        gateway.end(f"protocol error: request {request.request_id} at a control port")

    def aborted(self, gateway: GatewayConnection, abort: Abort) -> None:
        """Ends the connection: requests do not come here."""
        gateway.end(f"protocol error: abort of {len(abort.request_ids)} at a control port")

    def wanted(self, gateway: GatewayConnection, demand: RoomWanted) -> None:
        """Ends the connection: requests do not come here, nor are they asked for."""
        gateway.end(f"protocol error: {demand.num_requests} requests wait for a control port")

    def asked_for_a_way(self, gateway: GatewayConnection) -> None:
        """Ends the connection: requests do not come here, nor are there any."""
        gateway.end("protocol error: a control port has no batch work")

    def watched(self, gateway: GatewayConnection) -> None:
        """Ends the connection: an engine's cache is told of elsewhere."""
        gateway.end("protocol error: a control port tells of no cache")

    def engine_info(self) -> bytes:
        """Returns nothing: what the engine is stands in the deed."""
        return b"{}"

    def load_for(self, gateway: GatewayConnection) -> EngineLoad | None:  # noqa: ARG002
        """Returns `None`: gateways are told."""
        return None

    def stats_for(self, gateway: GatewayConnection) -> EngineStats | None:  # noqa: ARG002
        """Returns `None`: gateways are told."""
        return None

    def room_for(self, gateway: GatewayConnection) -> None:
        """Returns `None`: nothing may be sent here."""

    def called(self, gateway: GatewayConnection, call: Call) -> None:
        """Does what the owner asks for, or says why not."""
        task = asyncio.create_task(self._answer(gateway, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    # What a call does.

    async def _answer(self, gateway: GatewayConnection, call: Call) -> None:
        try:
            result = await self._run(gateway, call)
        except (ClaimRefusedError, msgspec.MsgspecError, ValueError) as error:
            gateway.send(Reply(call.call_id, error=str(error)))
        except Exception as error:
            logger.exception("control_call_failed method=%s", call.method)
            gateway.send(Reply(call.call_id, error=repr(error)))
        else:
            gateway.send(Reply(call.call_id, result))

    async def _run(self, gateway: GatewayConnection, call: Call) -> bytes:
        if call.method == "claim":
            return self._claim(gateway, msgspec.json.decode(call.args, type=ClaimArgs).owner)
        number = self._numbers.get(gateway)
        if number is None or not self.lease.is_current(number):
            raise ClaimRefusedError(f"it is not the owner: {self.lease.owner} has the engine")
        if call.method == "deed":
            self._deed = call.args
        elif call.method == "status":
            return msgspec.json.encode(await self._commanded.status())
        elif call.method == "drain":
            drain = msgspec.json.decode(call.args, type=DrainArgs)
            await self._commanded.drain(drain.reason, drain.grace_s, drain.stay_s)
        elif call.method == "programs":
            self._commanded.note_programs(msgspec.json.decode(call.args, type=ProgramsMoved))
        elif call.method == "leave":
            within_s = msgspec.json.decode(call.args, type=LeaveArgs).within_s
            self._leave(number, within_s, "it has left")
        elif call.method == "end":
            # From here on nobody can have it, so its owner alone gives its slice back.
            self.lease.end()
            closing = asyncio.create_task(self._commanded.close(), name="close-engine")
            self._calls.add(closing)
            closing.add_done_callback(self._calls.discard)
            # An engine that hangs is ended with its process.
            await asyncio.wait({closing}, timeout=_CLOSE_S)
        else:
            raise ValueError(f"no call {call.method!r}")
        return b""

    def _claim(self, gateway: GatewayConnection, owner: str) -> bytes:
        if not self._deed and owner != self.lease.owner:
            raise ClaimRefusedError("the engine has not started yet")
        number = self.lease.claim(owner)
        self._numbers[gateway] = number
        logger.info(
            "engine_claimed engine_id=%s owner=%s number=%d",
            self._config.engine_id, owner, number,
        )  # fmt: skip
        return msgspec.json.encode(Claimed(number, self._deed))

    def _leave(self, number: int, within_s: float | None, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self.lease.leave(number, now_s, within_s)
        assert self.lease.ends_at_s is not None
        logger.warning(
            "engine_without_owner engine_id=%s last=%s ends_in_s=%.0f reason=%r",
            self._config.engine_id, self.lease.owner, self.lease.ends_at_s - now_s, reason,
        )  # fmt: skip

    async def _watch_lease(self) -> None:
        # The end moves whenever an owner comes or goes.
        while not self.lease.is_run_out(asyncio.get_running_loop().time()):  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
        self.lease.end()
        reason = f"nobody has claimed it since {self.lease.owner} was here"
        logger.warning("engine_lease_run_out engine_id=%s", self._config.engine_id)
        self._on_run_out(reason)


# An owner that was cut off while its engine starts has so long to come back.
_START_OVER_S = 20.0
