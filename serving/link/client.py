"""The gateway's end of a link: requests go down, tokens come up.

Owns one connection to one engine host, its calls in flight, and its unwritten messages. Does not
own the requests: the caller that is notified of a lost link resumes them on another one.
"""

import asyncio
import itertools
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from serving.domain.tokens.cached_blocks import CacheLayout
from serving.link.connection import HANDSHAKE_TIMEOUT_S, LinkConnection, Traffic
from serving.link.errors import FrameError, HandshakeError, LinkCallError, LinkClosedError
from serving.link.handshake import NONCE_BYTES, GatewayHandshake
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import (
    MAX_FRAME_BYTES,
    Abort,
    CacheDelta,
    CacheSnapshot,
    Call,
    Challenge,
    Draining,
    EngineEnd,
    EngineLoad,
    EngineLost,
    EngineMessage,
    EngineStats,
    GatewayMessage,
    MakeWay,
    Ping,
    Refused,
    Reply,
    Room,
    RoomWanted,
    Step,
    TokenRequest,
    WatchCache,
    Welcome,
)
from serving.link.tls import ClientTls, channel_of, tls_reason

# A token id below 2**32 takes at most 5 bytes of msgpack; names and lengths fit in the envelope.
_TOKEN_BYTES = 5
_ENVELOPE_BYTES = 4 * 1024

# A round trip is measured with the heartbeat that is due after this time.
_ROUND_TRIP_PERIOD_S = 1.0
_S_US = 1_000_000

_DECODER = msgspec.msgpack.Decoder(EngineMessage)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The bounds of one link, and what happens at each.

    Frames beyond `max_buffered_bytes` wait unencoded, so that a thousand long prompts resumed at
    once cost neither memory nor a stalled event loop. An engine host that takes too little for
    `write_stall_timeout_s`, or lets more than `max_waiting_messages` wait, is lost.
    """

    max_buffered_bytes: int = 1024 * 1024
    max_waiting_messages: int = 65_536
    write_stall_timeout_s: float = 5.0
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S


DEFAULT_HEARTBEAT = HeartbeatConfig()
DEFAULT_LIMITS = ClientLimits()


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """The gateway's reactions to what arrives. All run in the event loop and must not block.

    `on_draining` runs while the socket is read. `on_lost` runs exactly once when an open link ends
    by anything but `close`, never from inside `submit`, `abort` or `call`, and no other callback
    runs after it. Each may run before `connect` has returned to its caller.
    """

    on_lost: Callable[[str], None]
    on_draining: Callable[[Draining], None]


@dataclass(frozen=True, slots=True)
class LinkStats:
    """The traffic of one link, and the engine host's last report of its engine.

    `load` and `engine_stats` are `None` until there is a report. `round_trip_s` is that of the last
    measured heartbeat, through both event loops; `None` before the first.
    """

    traffic: Traffic
    silence_s: float = 0.0
    round_trip_s: float | None = None
    load: EngineLoad | None = None
    engine_stats: EngineStats | None = None


class LinkClient(LinkConnection):
    """The gateway's end of the link to one engine host. Made by `connect`."""

    def __init__(
        self,
        handshake: GatewayHandshake,
        callbacks: LinkCallbacks,
        heartbeat: HeartbeatConfig,
        limits: ClientLimits,
        own_certificate: bytes | None = None,
    ) -> None:
        """Takes this end's certificate in TLS (DER), `None` on a plain connection."""
        write_buffer_bytes = (limits.max_buffered_bytes // 4, limits.max_buffered_bytes)
        super().__init__(
            _DECODER, heartbeat, limits.handshake_timeout_s, write_buffer_bytes, own_certificate
        )
        self.engine_id = ""
        self.engine_info: dict[str, object] = {}
        self._load: EngineLoad | None = None
        self._engine_stats: EngineStats | None = None
        self._round_trip_s: float | None = None
        self._on_step: Callable[[Step], None] = self._keep_room
        self._on_cache: Callable[[CacheSnapshot | CacheDelta], None] = lambda _: None
        self._first_room: Room | None = None  # told before anybody received steps
        self._stamp_due_at_s = 0.0
        self._stamped_at_s: float | None = None  # the first of the heartbeats on their way
        self._handshake = handshake
        self._callbacks = callbacks
        self._limits = limits
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        self._is_closed_here = False
        # The way in which the host has reported that its engine ended; `None`: it reported nothing.
        self.reported_end: EngineEnd | None = None
        self._waiting: deque[msgspec.Struct] = deque()
        self._write_stalled_at_s: float | None = None  # None while the transport takes more
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[bytes]] = {}

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int],
        *,
        gateway_id: str,
        secret: bytes,
        callbacks: LinkCallbacks,
        heartbeat: HeartbeatConfig = DEFAULT_HEARTBEAT,
        limits: ClientLimits = DEFAULT_LIMITS,
        tls: ClientTls | None = None,
    ) -> Self:
        """Opens a link. `gateway_id` is unique to this process: a new link replaces its old one.

        `tls` says whether the link is encrypted, and keeps certificates for the next call; `None`:
        new ones by the default, which is on anything but loopback.

        Raises:
            HandshakeError: the engine host refused, or could not prove itself. Do not retry soon.
            LinkClosedError: the host cannot be reached or did not answer in time. Retry later.
        """
        tls = tls or ClientTls(secret)
        identities = tls.identities_for(address[0])
        for identity in identities:
            handshake = GatewayHandshake(gateway_id, secret, secrets.token_bytes(NONCE_BYTES))
            certificate = None if identity is None else identity.certificate
            client = cls(handshake, callbacks, heartbeat, limits, certificate)
            try:
                return await client._connected(address, tls.options(identity))
            except ssl.SSLCertVerificationError as error:
                if identity is identities[-1]:
                    raise HandshakeError(tls_reason(error)) from error
            except ssl.SSLError as error:
                raise HandshakeError(tls_reason(error)) from error
        raise AssertionError("a secret has a line at least")

    async def _connected(self, address: tuple[str, int], options: Mapping[str, Any]) -> Self:
        """Connects and shakes hands; raises `ssl.SSLError` beside what `connect` raises."""
        client, limits, loop = self, self._limits, self._loop
        try:
            async with asyncio.timeout(limits.handshake_timeout_s):
                await loop.create_connection(lambda: client, *address, **options)
                await client._welcomed
        except ssl.SSLError:
            raise
        except OSError as error:  # TimeoutError is one
            reason = str(error) or f"no answer within {limits.handshake_timeout_s} s"
            raise LinkClosedError(f"no link to {address[0]}:{address[1]}: {reason}") from error
        finally:
            if not client._welcomed.done():
                client._welcomed.cancel()
            if client._welcomed.cancelled():
                client.end("gave up connecting")
        return client

    @property
    def has_reported_end(self) -> bool:
        """True if the host has reported that its engine is gone."""
        return self.reported_end is not None

    @property
    def tells_room(self) -> bool:
        """True if the host says what it has room for; nothing is to be sent before it has."""
        return self.engine_info.get("tells_room") is True

    @property
    def cache_layout(self) -> CacheLayout | None:
        """How the engine names the blocks of its prefix cache; `None` if its host does not tell."""
        return CacheLayout.from_json(self.engine_info.get("cache"))

    @property
    def stats(self) -> LinkStats:
        """The present numbers of the link."""
        return LinkStats(
            self.traffic, self.silence_s, self._round_trip_s, self._load, self._engine_stats
        )

    @property
    def late_s(self) -> float:
        """How long a message takes to the engine host and back, by the last measured heartbeat.

        Longer, if one has been on its way for longer; 0 before the first. In it are what waits in
        both event loops and in the sockets between.
        """
        on_its_way_s = 0.0 if self._stamped_at_s is None else self._loop.time() - self._stamped_at_s
        return max(self._round_trip_s or 0.0, on_its_way_s)

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        """Sets the receiver of the engine's steps, called while the socket is read.

        The receiver must not block. Of steps before this call it gets the latest that told of room:
        nothing was submitted yet.
        """
        self._on_step = on_step
        if self._first_room is not None:
            on_step(Step([], room=self._first_room))
            self._first_room = None

    def submit(self, request: TokenRequest) -> None:
        """Sends a request; does not wait.

        Raises:
            LinkClosedError: it was not sent. Resume it elsewhere.
            FrameError: it is too large for any engine. Fail it.
        """
        num_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        most_bytes = _ENVELOPE_BYTES + _TOKEN_BYTES * num_tokens + sum(map(len, request.payload))
        if most_bytes > MAX_FRAME_BYTES:
            msg = f"request of up to {most_bytes} bytes, at most {MAX_FRAME_BYTES} fit in a frame"
            raise FrameError(msg)
        self._send(request)

    def watch_cache(self, on_change: Callable[[CacheSnapshot | CacheDelta], None]) -> None:
        """Has a host that describes a cache tell what it has; called while the socket is read.

        A no-op when the link is closed.
        """
        self._on_cache = on_change
        if self.is_open:
            self._send(WatchCache())

    def want_room(self, wanted: RoomWanted) -> None:
        """Tells what waits for room, to a host that tells of room; the latest replaces the others.

        A no-op when the link is closed.
        """
        if self.is_open:
            self._send(wanted)

    def make_way(self) -> None:
        """Asks for the place of one request of others' batch work, where the host told of some.

        A no-op when the link is closed.
        """
        if self.is_open:
            self._send(MakeWay())

    def abort(self, request_ids: list[str]) -> None:
        """Stops these requests; their outputs may still arrive for a moment. Idempotent."""
        if self.is_open:
            self._send(Abort(request_ids))

    async def call(self, method: str, args: bytes, timeout_s: float) -> bytes:
        """Runs a rare engine operation and returns its result.

        Raises:
            LinkCallError: the engine host answered with an error.
            LinkClosedError: the link ended before the answer; the operation may have run.
            TimeoutError: no answer within `timeout_s`; the operation may still run.
        """
        call_id = next(self._call_ids)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._send(Call(call_id, method, args))
        self._calls[call_id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._calls.pop(call_id, None)

    async def close(self) -> None:
        """Ends the link without a call of `on_lost`, and waits until it is gone. Idempotent."""
        self._is_closed_here = True
        self.end("closed by the gateway")
        await asyncio.shield(self.closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the `Hello` of this gateway."""
        super().connection_made(transport)
        self._write(self._handshake.hello)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the link; an engine host that refuses our certificate says so only here."""
        if isinstance(exc, ssl.SSLError) and not self._welcomed.done():
            self._refuse(tls_reason(exc))
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Makes messages wait from now on."""
        super().pause_writing()
        self._write_stalled_at_s = self._loop.time()

    def resume_writing(self) -> None:
        """Writes the messages that waited, until the transport has enough again."""
        super().resume_writing()
        self._write_stalled_at_s = None
        while self._waiting and not self._is_write_paused:
            self._write(self._waiting.popleft())

    def _send(self, message: msgspec.Struct) -> None:
        if not self.is_open:
            raise LinkClosedError(self.end_reason or "the link is not open yet")
        if not self._is_write_paused:
            self._write_soon(message)
            return
        if len(self._waiting) >= self._limits.max_waiting_messages:
            self.end(f"the engine host does not read: {len(self._waiting)} messages wait")
            raise LinkClosedError(self.end_reason)
        self._waiting.append(message)

    def _receive(self, message: GatewayMessage | EngineMessage) -> None:
        if not self.is_open:
            self._shake_hands(message)
        elif isinstance(message, Step):
            if message.load is not None:
                self._load = message.load
            self._on_step(message)
        elif isinstance(message, Ping):
            self._receive_ping(message)
        elif isinstance(message, Reply):
            self._receive_reply(message)
        elif isinstance(message, CacheSnapshot | CacheDelta):
            self._on_cache(message)
        elif isinstance(message, Draining):
            self._callbacks.on_draining(message)
        elif isinstance(message, EngineLost):
            self.reported_end = _known_end(message.end)
            self.end(f"engine lost: {message.reason}")
        else:
            self._violated(message)

    def _keep_room(self, step: Step) -> None:
        self._first_room = step.room or self._first_room

    def _receive_ping(self, ping: Ping) -> None:
        if ping.load is not None:
            self._load = ping.load
        if ping.room is not None:
            self._on_step(Step([], room=ping.room))
        if ping.engine_stats is not None:
            self._engine_stats = ping.engine_stats
        if ping.echo_us is not None:
            self._round_trip_s = max(0.0, self._loop.time() - ping.echo_us / _S_US)
            self._stamped_at_s = None

    def _stamp_us(self) -> int | None:
        """Returns the time in microseconds if a round trip is to be measured again, else `None`."""
        now_s = self._loop.time()
        if now_s < self._stamp_due_at_s:
            return None
        self._stamp_due_at_s = now_s + _ROUND_TRIP_PERIOD_S
        if self._stamped_at_s is None:
            self._stamped_at_s = now_s
        return int(now_s * _S_US)

    def _shake_hands(self, message: GatewayMessage | EngineMessage) -> None:
        if isinstance(message, Challenge) and not self.engine_id:
            try:
                proof = self._handshake.answer(message, self._channel())
            except HandshakeError as error:
                self._refuse(str(error))
                return
            self.engine_id = message.engine_id
            self._trust()
            self._write(proof)
        elif isinstance(message, Welcome) and self.engine_id:
            try:
                self.engine_info = msgspec.json.decode(message.engine_info, type=dict[str, object])
            except msgspec.MsgspecError as error:
                self.end(f"protocol error: engine_info is not a JSON object: {error}")
                return
            self._open()
            self._welcomed.set_result(None)
        elif isinstance(message, Refused):
            self._refuse(f"refused by the engine host: {message.reason}")
        else:
            self._violated(message)

    def _channel(self) -> bytes:
        if self._own_certificate is None:
            return b""
        return channel_of(self._peer_certificate(), self._own_certificate)

    def _refuse(self, reason: str) -> None:
        self._welcomed.set_exception(HandshakeError(reason))
        self.end(reason)

    def _receive_reply(self, reply: Reply) -> None:
        answer = self._calls.get(reply.call_id)
        if answer is None or answer.done():  # its caller has stopped waiting
            return
        if reply.error is not None:
            answer.set_exception(LinkCallError(reply.error))
        else:
            answer.set_result(reply.result)

    def _beat(self, *, is_ping_due: bool, is_late: bool) -> None:
        timeout_s = self._limits.write_stall_timeout_s
        if self._write_stalled_at_s is None:
            if is_ping_due:
                self._write(Ping(stamp_us=self._stamp_us()))
        elif not is_late and self._loop.time() - self._write_stalled_at_s >= timeout_s:
            self.end(f"the engine host does not read: it took too little for {timeout_s} s")

    def _ended(self, reason: str) -> None:
        self._waiting.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(LinkClosedError(reason))
        if not self._welcomed.done():
            self._welcomed.set_exception(LinkClosedError(reason))
        elif not self._welcomed.cancelled() and self._welcomed.exception() is None:
            self._loop.call_soon(self._report_lost, reason)

    def _report_lost(self, reason: str) -> None:
        if not self._is_closed_here:
            self._callbacks.on_lost(reason)


def _known_end(number: int) -> EngineEnd:
    """Returns the end of an engine; of a kind that only a later build knows, a crash."""
    try:
        return EngineEnd(number)
    except ValueError:
        return EngineEnd.CRASHED
