"""The engine host's end of the links: many gateways, one engine.

Owns which gateway each request belongs to, the pump from engine steps to frames, and the abort of
requests when a gateway goes. Does not own the engine's life: the host starts and closes it, and
watches `wait_died`; nor the shares of its room (`rooms`).

What happens at each bound: a gateway that leaves more than `max_buffered_bytes` unread is
disconnected. A request that finds `max_waiting_messages` in front of the engine is refused, and so
is a call beyond `max_calls`. Of too many unproven connections the oldest goes.
"""

import asyncio
import logging
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from serving.domain.limits import MAX_BUFFERED_BYTES, STATS_INTERVAL_S, LinkEncryption, needs_tls
from serving.domain.tokens.cached_blocks import KEY_BYTES
from serving.link.batch_counts import BatchCounts
from serving.link.cache_teller import CacheTeller
from serving.link.connection import HANDSHAKE_TIMEOUT_S
from serving.link.engine_protocol import Engine, EngineDiedError
from serving.link.errors import FrameError
from serving.link.gateway_connection import ConnectionConfig, GatewayConnection
from serving.link.handshake import validate_secret
from serving.link.heartbeat import HeartbeatConfig
from serving.link.listener import LinkListener, engine_listener
from serving.link.messages import (
    Abort,
    Call,
    Draining,
    EngineEnd,
    EngineLoad,
    EngineLost,
    EngineStats,
    Finish,
    ProgramsMoved,
    Reply,
    Room,
    RoomWanted,
    Step,
    TokenOutput,
    TokenRequest,
)
from serving.link.request_spans import RequestSpans
from serving.link.rooms.gateway_rooms import GatewayRooms
from serving.link.rooms.step_watch import StepWatch
from serving.link.rooms.turns import ChargedRequest
from serving.telemetry.log_lines import log_traced
from serving.telemetry.loop_turns import LoopTurns
from serving.telemetry.spans import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

# A gateway may stand still for seconds (a long tokenization, a pause to collect garbage); cutting
# it off costs every stream it carries, a dead one only keeps some slots busy meanwhile.
DEFAULT_HEARTBEAT = HeartbeatConfig(timeout_s=5.0)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The bounds of one engine host's links; the module's docstring says what happens at each."""

    max_buffered_bytes: int = MAX_BUFFERED_BYTES
    max_waiting_messages: int = 16_384
    max_calls: int = 64
    max_unproven: int = 256
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    load_interval_s: float = 0.1
    stats_interval_s: float = STATS_INTERVAL_S


DEFAULT_LIMITS = ServerLimits()


@dataclass(slots=True)
class _Owned:
    gateway: GatewayConnection
    charged: ChargedRequest
    batch_id: str  # empty for what is no line of a batch


_Work = tuple[GatewayConnection, TokenRequest] | Abort


class LinkServer:
    """Serves one engine to many gateways. Made and used inside one event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        engine_id: str,
        secret: bytes,
        heartbeat: HeartbeatConfig = DEFAULT_HEARTBEAT,
        limits: ServerLimits = DEFAULT_LIMITS,
        tracer: Tracer = NO_TRACER,
        host_info: Mapping[str, object] | None = None,
        encryption: LinkEncryption = LinkEncryption.AUTO,
    ) -> None:
        """Makes a server; gateways get `host_info` (JSON values) with the engine's description."""
        validate_secret(secret)
        self.engine_id = engine_id
        self.limits = limits
        self.death_reason: str | None = None  # None while the engine lives
        self._engine = engine
        self._host_info = dict(host_info or {})
        self._connection_config = ConnectionConfig(
            engine_id, secret, heartbeat, limits.max_buffered_bytes, limits.handshake_timeout_s
        )
        self._died = asyncio.Event()
        self._draining: Draining | None = None  # None until `drain`
        self._is_closed = False
        self._encryption = encryption
        self._listener: LinkListener | None = None
        self._connections: dict[GatewayConnection, None] = {}  # oldest first, proven or not
        self._gateways: dict[str, GatewayConnection] = {}  # gateway id -> its open link
        self._owners: dict[str, _Owned] = {}  # by request id
        self._tenant_tokens: Counter[str] = Counter()  # output tokens since the start
        self._batches = BatchCounts()
        self._waiting: asyncio.Queue[_Work] = asyncio.Queue()  # in order of arrival
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[bytes]] = set()
        self._steps = StepWatch()
        self._rooms: GatewayRooms[GatewayConnection] | None = None  # None: it takes everything
        if engine.capacity is not None:
            self._rooms = GatewayRooms(engine.capacity)
            self._host_info["tells_room"] = True
        if engine.cached is not None:
            self._host_info["cache"] = engine.cached.layout.to_json()
        self._cache = CacheTeller(lambda: engine.cached)
        self._unfed_tokens = 0  # of requests that the engine has not got yet
        self._tells_room_soon = False
        # What the engine host reports of compiled programs, with the engine's stats.
        self.programs_moved: ProgramsMoved | None = None
        self._turns = LoopTurns()
        self._spans = RequestSpans(tracer, engine_id)
        if tracer.is_on:
            engine.on_scheduled = self._spans.scheduled

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that the server listens on; a port of 0 has become the chosen one."""
        assert self._listener is not None, "listen first"
        return self._listener.address

    @property
    def num_requests(self) -> int:
        """The number of requests that some gateway still expects outputs for."""
        return len(self._owners)

    @property
    def gateway_ids(self) -> frozenset[str]:
        """The gateways with an open link."""
        return frozenset(self._gateways)

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Accepts gateways and starts the pump. Raises `OSError` when the address is taken."""
        loop = asyncio.get_running_loop()
        self._turns.start()
        config = self._connection_config
        self._listener = engine_listener(self, config, self._encryption, host)
        await self._listener.listen(host, port)
        for work in (self._pump(), self._feed_engine()):
            task = loop.create_task(work)
            task.add_done_callback(self._work_ended)
            self._tasks.append(task)
        logger.info(
            "link listens engine_id=%s address=%s:%d is_encrypted=%s",
            self.engine_id, *self.address, needs_tls(self._encryption, host),
        )  # fmt: skip

    async def wait_died(self) -> str:
        """Waits until the engine is gone, and returns why."""
        await self._died.wait()
        assert self.death_reason is not None
        return self.death_reason

    def drain(self, reason: str, grace_s: float) -> None:
        """Asks all gateways, and those that connect later, to send nothing new.

        Requests already on their way are still taken: the gateway resumes them if it has to.
        """
        self._draining = Draining(reason, grace_s)
        logger.info(
            "link drains engine_id=%s reason=%s grace_s=%.1f requests=%d gateways=%d",
            self.engine_id, reason, grace_s, self.num_requests, len(self._gateways),
        )  # fmt: skip
        for gateway in list(self._gateways.values()):
            gateway.send(self._draining)

    async def close(
        self, reason: str = "the engine host closed", end: EngineEnd = EngineEnd.TOLD
    ) -> None:
        """Ends every link, aborts its requests and stops listening. Idempotent."""
        self._is_closed = True
        self._turns.stop()
        self._cache.stop()
        if self._listener is not None:
            self._listener.close()
        orphans = list(self._owners)
        self._end_all(reason, end)
        workers = [*self._tasks, *self._calls]
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        # Bounded by the farewell timeout of each.
        await asyncio.gather(*(asyncio.shield(link.closed) for link in list(self._connections)))
        if orphans and self.death_reason is None:
            try:
                await self._engine.abort(orphans)
            except EngineDiedError as error:
                logger.info("engine died at close engine_id=%s reason=%s", self.engine_id, error)

    # What the connections call.

    def connected(self, connection: GatewayConnection) -> None:
        """Takes a connection that has proved nothing yet."""
        unproven = [
            link for link in self._connections if not link.is_open and link.end_reason is None
        ]
        if len(unproven) >= self.limits.max_unproven:
            unproven[0].end(f"more than {self.limits.max_unproven} connections shake hands at once")
        self._connections[connection] = None

    def disconnected(self, connection: GatewayConnection) -> None:
        """Forgets a connection, because its transport is gone."""
        self._connections.pop(connection, None)

    def engine_info(self) -> bytes:
        """Returns the descriptions of the engine by itself and by its host, as JSON."""
        return msgspec.json.encode({**self._engine.info, **self._host_info})

    def load_for(self, gateway: GatewayConnection) -> EngineLoad | None:
        """Returns the engine's load, or `None` when this gateway had it a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if now_s < gateway.load_due_at_s:
            return None
        gateway.load_due_at_s = now_s + self.limits.load_interval_s
        # An engine may report with its steps only, and after an abort there is no next step.
        return self._engine.load if self._owners else EngineLoad()

    def stats_for(self, gateway: GatewayConnection) -> EngineStats | None:
        """Returns the engine's work; `None` until it is due again, or if the engine counts none."""
        now_s = asyncio.get_running_loop().time()
        if now_s < gateway.stats_due_at_s:
            return None
        gateway.stats_due_at_s = now_s + self.limits.stats_interval_s
        engine_stats = self._engine.engine_stats
        if engine_stats is None:
            return None
        batch_tokens, batch_sequences = self._batches.report(
            (
                (each.charged.tenant, each.batch_id)
                for each in self._owners.values()
                if each.batch_id
            ),
            now_s,
        )
        return msgspec.structs.replace(
            engine_stats,
            # As of its last step; after an abort there is no next one.
            num_deferred=engine_stats.num_deferred if self._owners else 0,
            tenant_tokens=dict(self._tenant_tokens),
            tenant_sequences=dict(Counter(each.charged.tenant for each in self._owners.values())),
            batch_tokens=batch_tokens,
            batch_sequences=batch_sequences,
            is_yours=gateway.gateway_id == self._stats_reader(),
            programs_moved=self.programs_moved,
            longest_turn_s=self._turns.longest_s,
            num_places=None if self._rooms is None else self._rooms.num_places,
        )

    def opened(self, gateway: GatewayConnection) -> None:
        """Takes a gateway that has proved itself, and replaces its older link if there is one."""
        older = self._gateways.get(gateway.gateway_id)
        if older is not None:
            older.end("replaced by a newer link of the same gateway")
        self._gateways[gateway.gateway_id] = gateway
        if self._rooms is not None:
            self._rooms.opened(gateway)
            self._tell_room_soon()
        logger.info("link opened engine_id=%s gateway_id=%s", self.engine_id, gateway.gateway_id)
        if self._draining is not None:
            gateway.send(self._draining)

    def ended(self, gateway: GatewayConnection, reason: str) -> None:
        """Aborts the requests of a proven gateway on the engine, because its link has ended."""
        orphans = [rid for rid, owned in self._owners.items() if owned.gateway is gateway]
        for request_id in orphans:
            self._disown(request_id)
            self._spans.ended(request_id, "gateway_left")
        if orphans:
            self._waiting.put_nowait(Abort(orphans))
        if self._rooms is not None:
            self._rooms.left(gateway, asyncio.get_running_loop().time())
            self._tell_room_soon()
        self._cache.left(gateway)
        if self._gateways.get(gateway.gateway_id) is gateway:
            del self._gateways[gateway.gateway_id]
        logger.info(
            "link ended engine_id=%s gateway_id=%s reason=%s requests_aborted=%d",
            self.engine_id, gateway.gateway_id, reason, len(orphans),
        )  # fmt: skip

    def submitted(self, gateway: GatewayConnection, request: TokenRequest) -> None:
        """Takes a request from its gateway, or refuses it with an error output."""
        if self._rooms is not None:
            self._rooms.took(gateway, _num_tokens(request))
            self._tell_room_soon()
        owner = self._owner(request.request_id)
        if owner is gateway:
            # An error output would end the live request at its gateway, which knows it by this id.
            log_traced(
                logger, logging.WARNING, self._spans.trace_id(request.request_id),
                "duplicate request ignored request_id=%s engine_id=%s gateway_id=%s",
                request.request_id, self.engine_id, gateway.gateway_id,
            )  # fmt: skip
        elif owner is not None:
            self._refuse(gateway, request.request_id, "another gateway's request has this id")
        elif self._waiting.qsize() >= self.limits.max_waiting_messages:
            self._refuse(gateway, request.request_id, "too many requests wait for the engine")
        elif len(request.expected_keys) % KEY_BYTES:
            self._refuse(gateway, request.request_id, "its expected_keys are not whole keys")
        else:
            charged = ChargedRequest.of(request)
            self._owners[request.request_id] = _Owned(gateway, charged, request.batch_id)
            if self._rooms is not None:
                now_s = asyncio.get_running_loop().time()
                self._rooms.began(gateway, request.request_id, charged, now_s)
            self._cache.came(request.request_id, request.expected_keys)
            self._spans.taken(request)
            self._unfed_tokens += _num_tokens(request)
            self._waiting.put_nowait((gateway, request))
            self._log_taken(gateway, request)

    def aborted(self, gateway: GatewayConnection, abort: Abort) -> None:
        """Forgets those of the requests that are this gateway's, and frees them on the engine."""
        owned = [rid for rid in abort.request_ids if self._owner(rid) is gateway]
        for request_id in owned:
            self._disown(request_id)
            logger.debug("request_aborted engine_id=%s request_id=%s", self.engine_id, request_id)
            self._spans.ended(request_id, "aborted")
        if owned:
            self._waiting.put_nowait(Abort(owned))
            self._tell_room_soon()

    def wanted(self, gateway: GatewayConnection, demand: RoomWanted) -> None:
        """Notes what waits at the gateway, and gives it its share of the room."""
        if self._rooms is not None:
            self._rooms.wanted(gateway, demand, asyncio.get_running_loop().time())
            self._tell_room_soon()

    def asked_for_a_way(self, gateway: GatewayConnection) -> None:
        """Asks batch work of another gateway back, for something that cannot wait at this one."""
        if self._rooms is not None:
            self._rooms.ask_for_a_way(gateway, asyncio.get_running_loop().time())
            self._tell_room_soon()

    def watched(self, gateway: GatewayConnection) -> None:
        """Tells the gateway what the engine's cache has, from now on."""
        self._cache.watch(gateway)

    def called(self, gateway: GatewayConnection, call: Call) -> None:
        """Runs a call beside everything else and answers when it is done."""
        if len(self._calls) >= self.limits.max_calls:
            error = f"more than {self.limits.max_calls} calls at once"
            gateway.send(Reply(call.call_id, error=error))
            return
        task = asyncio.create_task(self._engine.call(call.method, call.args))
        self._calls.add(task)

        def reply(done: asyncio.Task[bytes]) -> None:
            self._calls.discard(done)
            self._cache.look()  # it may have emptied the cache
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                answer = Reply(call.call_id, done.result())
            else:
                answer = Reply(call.call_id, error=str(error) or type(error).__name__)
            try:
                gateway.send(answer)
            except FrameError as too_large:
                gateway.send(Reply(call.call_id, error=str(too_large)))

        task.add_done_callback(reply)

    def room_for(self, gateway: GatewayConnection) -> Room | None:
        """Returns what the gateway may send now; `None` if the engine takes everything."""
        if self._rooms is None:
            return None
        self._look(self._rooms)
        return self._rooms.room_of(gateway)

    # The work between the gateways and the engine.

    def _look(self, rooms: GatewayRooms[GatewayConnection]) -> None:
        """Deals out what the engine has room for now."""
        # An engine may report with its steps only, and after an abort there is no next step.
        load = self._engine.load
        if not self._owners:
            load = EngineLoad(computed_ratio=load.computed_ratio)
        if self._unfed_tokens:
            unfed = round(self._unfed_tokens * load.computed_ratio)
            load = msgspec.structs.replace(load, backlog_tokens=load.backlog_tokens + unfed)
        now_s = asyncio.get_running_loop().time()
        if self._steps.is_due(now_s) and (stats := self._engine.engine_stats) is not None:
            rooms.stepped(self._steps.look(stats, now_s), now_s)
        rooms.look(load, len(self._owners), now_s)

    def _tell_room_soon(self) -> None:
        """Tells of room in the next turn of the loop, once for all that this one changes."""
        if self._rooms is not None and not self._tells_room_soon:
            self._tells_room_soon = True
            asyncio.get_running_loop().call_soon(self._tell_room)

    def _tell_room(self) -> None:
        self._tells_room_soon = False
        if self._rooms is None or self._is_closed or self.death_reason is not None:
            return
        self._look(self._rooms)
        self._tell_who_has_to_hear(self._rooms)

    @staticmethod
    def _tell_who_has_to_hear(rooms: GatewayRooms[GatewayConnection]) -> None:
        for gateway in rooms.to_tell:
            gateway.send_outputs([], None, rooms.room_of(gateway))

    def _stats_reader(self) -> str | None:
        """Returns the gateway that shows this engine's metrics; gateways share the engines."""
        return max(
            self._gateways,
            key=lambda gateway_id: zlib.crc32(f"{self.engine_id} {gateway_id}".encode()),
            default=None,
        )

    def _owner(self, request_id: str) -> GatewayConnection | None:
        """Returns the gateway that expects a request's outputs; `None` if none does."""
        owned = self._owners.get(request_id)
        return None if owned is None else owned.gateway

    def _disown(self, request_id: str) -> None:
        """Forgets a request that its gateway expects nothing of any more."""
        owned = self._owners.pop(request_id)
        self._cache.ended(request_id)
        if self._rooms is not None:
            self._rooms.ended(request_id, owned.charged)

    async def _pump(self) -> None:
        while True:
            self._publish(await self._engine.next_step())

    async def _feed_engine(self) -> None:
        """Hands requests and aborts to the engine in the order they came, one at a time."""
        while True:
            work = await self._waiting.get()
            if isinstance(work, Abort):
                await self._engine.abort(work.request_ids)
                continue
            gateway, request = work
            try:
                if self._owner(request.request_id) is gateway:  # else aborted already
                    await self._engine.submit(request)
            except ValueError as error:
                if self._owner(request.request_id) is gateway:  # it may have left meanwhile
                    self._disown(request.request_id)
                    self._refuse(gateway, request.request_id, str(error))
                    self._tell_room_soon()
            finally:
                self._unfed_tokens -= _num_tokens(request)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        """Ends the server over a failed task: pump and feed end only with the engine or a fault."""
        if task.cancelled() or self._is_closed or self.death_reason is not None:
            return
        error = task.exception()
        if isinstance(error, EngineDiedError):
            reason, end = str(error), error.end
        else:
            reason, end = repr(error), EngineEnd.CRASHED
        self.death_reason = reason
        logger.error(
            "engine died engine_id=%s reason=%s requests=%d gateways=%d",
            self.engine_id, reason, self.num_requests, len(self._gateways),
        )  # fmt: skip
        if self._listener is not None:
            self._listener.close()
        self._end_all(reason, end)
        for worker in self._tasks:
            worker.cancel()
        self._died.set()

    def _end_all(self, reason: str, end: EngineEnd) -> None:
        self._owners.clear()
        self._spans.end_all(reason)
        for link in list(self._connections):
            link.end(reason, farewell=EngineLost(reason, int(end)) if link.is_open else None)

    def _publish(self, outputs: list[TokenOutput]) -> None:
        """Splits one engine step by owner: one frame per gateway that has a part in it."""
        owners, tenant_tokens = self._owners, self._tenant_tokens
        touched: list[GatewayConnection] = []
        self._cache.look()
        if self._spans:
            self._spans.stepped(outputs)
        for output in outputs:
            owned = owners.get(output.request_id)
            if owned is None:  # aborted meanwhile
                continue
            gateway, charged = owned.gateway, owned.charged
            tenant_tokens[charged.tenant] += len(output.token_ids)
            charged.num_outputs += len(output.token_ids)
            if owned.batch_id:
                self._batches.add(charged.tenant, owned.batch_id, len(output.token_ids))
            if output.num_cached is not None:
                charged.num_cached = output.num_cached
            if output.finish is not None:
                self._disown(output.request_id)
            if not gateway.batch:
                touched.append(gateway)
            gateway.batch.append(output)
        rooms = self._rooms
        if rooms is not None:
            self._look(rooms)
        for gateway in touched:
            batch, gateway.batch = gateway.batch, []
            room = None if rooms is None else rooms.room_of(gateway)
            for request_id in gateway.send_outputs(batch, self.load_for(gateway), room):
                self.aborted(gateway, Abort([request_id]))
                self._refuse(gateway, request_id, "one step's output is larger than a frame")
        if rooms is not None:
            self._tell_who_has_to_hear(rooms)

    def _log_taken(self, gateway: GatewayConnection, request: TokenRequest) -> None:
        """Logs a request that is taken: a resumed one at info level, any other at debug level."""
        num_emitted = len(request.emitted_token_ids)
        level = logging.INFO if num_emitted else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        log_traced(
            logger, level, self._spans.trace_id(request.request_id),
            "request_taken engine_id=%s gateway_id=%s request_id=%s prompt=%d emitted=%d",
            self.engine_id, gateway.gateway_id, request.request_id,
            len(request.prompt_token_ids), num_emitted,
        )  # fmt: skip

    def _refuse(self, gateway: GatewayConnection, request_id: str, reason: str) -> None:
        log_traced(
            logger, logging.WARNING, self._spans.trace_id(request_id),
            "request refused engine_id=%s gateway_id=%s request_id=%s reason=%r",
            self.engine_id, gateway.gateway_id, request_id, reason,
        )  # fmt: skip
        self._spans.ended(request_id, "refused", "refused")
        gateway.send(Step([TokenOutput(request_id, [], int(Finish.ERROR), reason)]))


def _num_tokens(request: TokenRequest) -> int:
    return len(request.prompt_token_ids) + len(request.emitted_token_ids)
