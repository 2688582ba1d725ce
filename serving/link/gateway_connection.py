"""Drives one gateway's connection to an engine host, from the engine host's end.

Owns its handshake, its heartbeat and the bound on its unread bytes. Does not own the requests: the
engine host does, and is notified of everything that arrives.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from serving.link.connection import LinkConnection
from serving.link.errors import FrameError, HandshakeError
from serving.link.handshake import NONCE_BYTES, EngineHandshake
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import (
    Abort,
    Call,
    EngineLoad,
    EngineMessage,
    EngineStats,
    GatewayMessage,
    Hello,
    MakeWay,
    Ping,
    Proof,
    Refused,
    Room,
    RoomWanted,
    Step,
    TokenOutput,
    TokenRequest,
    WatchCache,
    Welcome,
)
from serving.link.tls import channel_of

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(GatewayMessage)


class ConnectionOwner(Protocol):
    """The receiver of a connection's events: `LinkServer` or a test."""

    def connected(self, connection: "GatewayConnection") -> None:
        """Notes a connection that has proved nothing yet."""

    def opened(self, gateway: "GatewayConnection") -> None:
        """Notes that the gateway has proved itself and been welcomed."""

    def ended(self, gateway: "GatewayConnection", reason: str) -> None:
        """Notes that an open link has ended."""

    def disconnected(self, connection: "GatewayConnection") -> None:
        """Notes that the transport of any connection, proven or not, is gone."""

    def submitted(self, gateway: "GatewayConnection", request: TokenRequest) -> None:
        """Takes a request that has arrived."""

    def aborted(self, gateway: "GatewayConnection", abort: Abort) -> None:
        """Takes an abort that has arrived."""

    def called(self, gateway: "GatewayConnection", call: Call) -> None:
        """Takes a call that has arrived."""

    def wanted(self, gateway: "GatewayConnection", demand: RoomWanted) -> None:
        """Takes what waits at the gateway."""

    def asked_for_a_way(self, gateway: "GatewayConnection") -> None:
        """Asks batch work of another gateway back."""

    def watched(self, gateway: "GatewayConnection") -> None:
        """Tells the gateway what the engine's cache has, from now on."""

    def engine_info(self) -> bytes:
        """Returns the engine's own description, as JSON."""
        ...

    def load_for(self, gateway: "GatewayConnection") -> EngineLoad | None:
        """Returns the engine's load, or `None` when this gateway had it a moment ago."""
        ...

    def stats_for(self, gateway: "GatewayConnection") -> EngineStats | None:
        """Returns the engine's work, or `None` when it is not yet time to report it again."""
        ...

    def room_for(self, gateway: "GatewayConnection") -> Room | None:
        """Returns what the gateway may send now; `None` if the engine takes everything."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """The settings that all connections of one engine host share. `secret` stays out of `repr`."""

    engine_id: str
    secret: bytes = field(repr=False)
    heartbeat: HeartbeatConfig
    max_buffered_bytes: int
    handshake_timeout_s: float


class GatewayConnection(LinkConnection):
    """The engine host's side of a connection, which may become one gateway's link."""

    def __init__(
        self,
        host: ConnectionOwner,
        config: ConnectionConfig,
        own_certificate: bytes | None = None,
    ) -> None:
        """Takes this end's certificate in TLS (DER), `None` on a plain connection."""
        # Paused means exactly: more than the limit is unsent.
        write_buffer_bytes = (config.max_buffered_bytes, config.max_buffered_bytes)
        super().__init__(
            _DECODER,
            config.heartbeat,
            config.handshake_timeout_s,
            write_buffer_bytes,
            own_certificate,
        )
        self.gateway_id = ""  # what the peer claims; true once it `is_open`
        self.batch: list[TokenOutput] = []  # its part of the step being published, else empty
        self.load_due_at_s = 0.0
        self.stats_due_at_s = 0.0
        self._host = host
        self._config = config
        self._handshake = EngineHandshake(
            config.engine_id, config.secret, secrets.token_bytes(NONCE_BYTES)
        )
        self._was_open = False

    def send(self, message: msgspec.Struct) -> None:
        """Sends to an open link; disconnects a gateway that has left too much unread.

        Raises:
            FrameError: the message is larger than a frame may be. Nothing was sent.
        """
        if self._may_send():
            self._write(message)

    def send_outputs(
        self, outputs: list[TokenOutput], load: EngineLoad | None, room: Room | None
    ) -> list[str]:
        """Sends the gateway's part of one engine step, as one frame unless that is too large.

        Returns the ids of requests whose output alone is too large for a frame, and was not sent.
        """
        return self._write_step(outputs, load, room) if self._may_send() else []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Notifies the host; the gateway speaks first, with a `Hello`."""
        super().connection_made(transport)
        self._host.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes that the transport is gone."""
        super().connection_lost(exc)
        self._host.disconnected(self)

    def _may_send(self) -> bool:
        if self.is_open and self._is_write_paused:
            self.end(f"slow gateway: more than {self._config.max_buffered_bytes} bytes unread")
        return self.is_open

    def _write_step(
        self, outputs: list[TokenOutput], load: EngineLoad | None, room: Room | None
    ) -> list[str]:
        try:
            self._write(Step(outputs, load, room))
        except FrameError:
            if len(outputs) == 1:
                return [outputs[0].request_id]
            middle = len(outputs) // 2
            return self._write_step(outputs[:middle], load, None) + self._write_step(
                outputs[middle:], None, room
            )
        return []

    def _receive(self, message: GatewayMessage | EngineMessage) -> None:
        if not self.is_open:
            self._shake_hands(message)
        elif isinstance(message, TokenRequest):
            self._host.submitted(self, message)
        elif isinstance(message, Abort):
            self._host.aborted(self, message)
        elif isinstance(message, Call):
            self._host.called(self, message)
        elif isinstance(message, RoomWanted):
            self._host.wanted(self, message)
        elif isinstance(message, MakeWay):
            self._host.asked_for_a_way(self)
        elif isinstance(message, WatchCache):
            self._host.watched(self)
        elif isinstance(message, Ping):
            if message.stamp_us is not None and not self._is_write_paused:
                self._write(Ping(echo_us=message.stamp_us))
        else:
            self._violated(message)

    def _shake_hands(self, message: GatewayMessage | EngineMessage) -> None:
        try:
            if isinstance(message, Hello):
                self._write(self._handshake.challenge(message, self._channel()))
                self.gateway_id = message.gateway_id
            elif isinstance(message, Proof):
                self._handshake.verify(message)
                self._welcome()
            else:
                self._violated(message)
        except HandshakeError as error:
            self.end(str(error), farewell=Refused(str(error)))

    def _channel(self) -> bytes:
        if self._own_certificate is None:
            return b""
        return channel_of(self._own_certificate, self._peer_certificate())

    def _welcome(self) -> None:
        self._trust()
        self._open()
        self._was_open = True
        self._write(Welcome(self._host.engine_info()))
        self._host.opened(self)

    def _beat(self, *, is_ping_due: bool, is_late: bool) -> None:  # noqa: ARG002 - only a client cares
        # What is already on its way is as good a sign of life as one more ping behind it.
        if is_ping_due and not self._is_write_paused:
            load, stats = self._host.load_for(self), self._host.stats_for(self)
            self._write(Ping(load, stats, room=self._host.room_for(self)))

    def _ended(self, reason: str) -> None:
        if self._was_open:
            self._host.ended(self, reason)
        else:
            logger.warning("link not opened gateway_id=%r reason=%s", self.gateway_id, reason)
