"""Runs one side of a link: frames in and out, deadlines, and how the link ends.

A frame is a 4-byte big-endian length, then one msgpack message. Owns the cut from bytes to message
bodies and the bound on one frame, the transport and every timer on it. Does not own the handshake's
rules or the meaning of a message: the two ends, `client` and `gateway_connection`, do.
"""

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import msgspec

from serving.link.errors import FrameError
from serving.link.heartbeat import HeartbeatConfig, Pulse
from serving.link.messages import MAX_FRAME_BYTES, EngineMessage, GatewayMessage, Refused

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()

# Bounds what a peer that has proved nothing can make us hold; the longest handshake message is a
# `Hello` of about a hundred bytes plus the gateway's name.
MAX_HANDSHAKE_FRAME_BYTES = 4 * 1024

# Bounds how long a peer that does not read can keep an ended link's last message in memory, and how
# long asyncio's own loop waits for the goodbye of TLS from a peer that is gone; uvloop does not.
FAREWELL_TIMEOUT_S = 1.0

# The first byte of a TLS alert and of a TLS handshake. That of our frames is 0, up to 16 MiB.
_TLS_RECORDS = (b"\x15", b"\x16")
TLS_ON_PLAIN = (
    "the peer's link is encrypted and this end's is not: both ends need the same link.encryption"
)

# The longest handshake is two round trips; the rest is room for a busy event loop at either end.
HANDSHAKE_TIMEOUT_S = 5.0

# More than this is not kept for the end of a turn, so that a transport can say that it is full.
_MOST_UNWRITTEN_BYTES = 64 * 1024


def encode_frame(message: msgspec.Struct) -> bytes:
    """Returns the message as one frame, ready to be written.

    Raises:
        FrameError: it is larger than `MAX_FRAME_BYTES`. Split it, or fail the request it carries.
    """
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameSplitter:
    """Cuts a stream of bytes into message bodies, however the bytes arrive.

    Holds at most one incomplete frame. `max_frame_bytes` may be changed between two bodies; it
    counts from the next one.
    """

    __slots__ = ("_pending", "_wanted_bytes", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._pending = bytearray()
        self._wanted_bytes = _LENGTH.size

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bodies that `data` completes, in order, each cut when it is asked for.

        Exhaust the iterator before the next call, or drop the splitter.

        Raises:
            FrameError: a length above `max_frame_bytes`; its body is never held. End the link.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._wanted_bytes:
                return
            data = bytes(self._pending)
            self._pending.clear()
        start, available = 0, len(data)
        self._wanted_bytes = _LENGTH.size
        while available - start >= _LENGTH.size:
            size = _LENGTH.unpack_from(data, start)[0]
            if size > self.max_frame_bytes:
                msg = f"frame of {size} bytes, at most {self.max_frame_bytes} are allowed"
                raise FrameError(msg)
            body_start = start + _LENGTH.size
            stop = body_start + size
            if stop > available:
                self._wanted_bytes = _LENGTH.size + size
                break
            yield data[body_start:stop]
            start = stop
        self._pending += data[start:]


@dataclass(slots=True)
class Traffic:
    """The traffic of one link since it was connected, its handshake included."""

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0


class LinkConnection(asyncio.Protocol):
    """The base of both sides of a link, which is shaking hands, open or ended.

    A link ends exactly once, with a reason (`end_reason`, `None` until then). Nothing is received
    or sent after that. `closed` is done when the transport is gone too.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[GatewayMessage] | msgspec.msgpack.Decoder[EngineMessage]",
        heartbeat: HeartbeatConfig,
        handshake_timeout_s: float,
        write_buffer_bytes: tuple[int, int],
        own_certificate: bytes | None = None,
    ) -> None:
        """Resumes writing below the first of `write_buffer_bytes`, and pauses above the other.

        `own_certificate` is this end's in TLS, DER; `None` on a plain connection.
        """
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.end_reason: str | None = None
        self.is_open = False
        self.traffic = Traffic()
        self._is_write_paused = False
        self._transport: asyncio.Transport | None = None
        self._unwritten: list[bytes] = []  # frames of this turn of the loop
        self._num_unwritten = 0  # bytes
        self._decode = decoder.decode
        self._splitter = FrameSplitter(MAX_HANDSHAKE_FRAME_BYTES)
        self._heartbeat = heartbeat
        self._handshake_timeout_s = handshake_timeout_s
        self._write_buffer_bytes = write_buffer_bytes
        self._own_certificate = own_certificate
        self._pulse = Pulse(heartbeat, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None

    # What the two ends fill in.

    def _receive(self, message: GatewayMessage | EngineMessage) -> None:
        """Takes one message, in order, while the link has not ended."""
        raise NotImplementedError

    def _beat(self, *, is_ping_due: bool, is_late: bool) -> None:
        """Runs at each tick of the heartbeat while the peer is alive."""
        raise NotImplementedError

    def _ended(self, reason: str) -> None:
        """Runs once when the link has just ended, possibly from within a send."""
        raise NotImplementedError

    @property
    def silence_s(self) -> float:
        """The seconds for which nothing has come from the peer."""
        return max(0.0, self._loop.time() - self._pulse.heard_at_s)

    # What the two ends use.

    @property
    def is_encrypted(self) -> bool:
        """True if the connection is in TLS."""
        return self._own_certificate is not None

    def _peer_certificate(self) -> bytes:
        """Returns the certificate that the peer has proved in TLS, DER."""
        assert self._transport is not None
        peer = self._transport.get_extra_info("ssl_object").getpeercert(True)  # noqa: FBT003
        assert peer is not None, "both ends' contexts demand one"
        return cast("bytes", peer)

    def _open(self) -> None:
        self.is_open = True
        self._pulse = Pulse(self._heartbeat, self._loop.time())
        self._set_timer(self._pulse.due_at_s)

    def _trust(self) -> None:
        """Admits large frames, because the peer has proved itself."""
        self._splitter.max_frame_bytes = MAX_FRAME_BYTES

    def _write(self, message: msgspec.Struct) -> None:
        """Hands one frame to the transport. Raises `FrameError` when the frame is too large."""
        if self.end_reason is None and self._transport is not None:
            self._add(message)
            self._flush()

    def _write_soon(self, message: msgspec.Struct) -> None:
        """Hands one frame to the transport with the others of this turn of the loop; as `_write`.

        A transport of uvloop writes at once, and that costs more than a frame's making.
        """
        if self.end_reason is None and self._transport is not None:
            if not self._unwritten:
                self._loop.call_soon(self._flush)
            self._add(message)
            if self._num_unwritten > _MOST_UNWRITTEN_BYTES:
                self._flush()

    def _add(self, message: msgspec.Struct) -> None:
        frame = encode_frame(message)
        self.traffic.bytes_out += len(frame)
        self.traffic.messages_out += 1
        self._unwritten.append(frame)
        self._num_unwritten += len(frame)

    def _flush(self) -> None:
        """Hands what is not written yet to the transport; nothing if the link has ended."""
        frames, self._unwritten, self._num_unwritten = self._unwritten, [], 0
        if frames and self.end_reason is None and self._transport is not None:
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _violated(self, message: msgspec.Struct) -> None:
        """Ends the link over a message that has no place in its present state."""
        self.end(f"protocol error: {type(message).__name__} out of place")

    def end(self, reason: str, farewell: msgspec.Struct | None = None) -> None:
        """Ends the link once; a `farewell` is sent after what is buffered, in bounded time."""
        if self.end_reason is not None:
            return
        if farewell is not None:
            self._write(farewell)
        self.end_reason = reason
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            if farewell is None:
                self._transport.abort()
            else:
                self._transport.close()
                self._timer = self._loop.call_later(FAREWELL_TIMEOUT_S, self._transport.abort)
        self._ended(reason)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the handshake's deadline."""
        # uvloop's transports are no subclass of asyncio's, though they behave as one.
        self._transport = cast("asyncio.Transport", transport)
        if self.end_reason is not None:  # given up while it was being connected
            self._transport.abort()
            return
        low_bytes, high_bytes = self._write_buffer_bytes
        self._transport.set_write_buffer_limits(high=high_bytes, low=low_bytes)
        self._timer = self._loop.call_later(
            self._handshake_timeout_s,
            self.end,
            f"handshake not finished within {self._handshake_timeout_s} s",
        )

    def data_received(self, data: bytes) -> None:
        """Cuts, decodes and delivers; whatever cannot be understood ends the link."""
        self._pulse.heard_at_s = self._loop.time()
        if not self.traffic.bytes_in and data[:1] in _TLS_RECORDS:
            # No TLS, which tells the peer what is wrong here too.
            self.end(TLS_ON_PLAIN, farewell=Refused(TLS_ON_PLAIN))
            return
        self.traffic.bytes_in += len(data)
        for message in self._messages(data):
            self.traffic.messages_in += 1
            self._receive(message)
            if self.end_reason is not None:
                return

    def eof_received(self) -> None:
        """Ends the link: a peer that stopped sending is gone, whatever is still unsent."""
        self.end("the peer closed the link")

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the link if it has not ended yet, and completes `closed`."""
        self.end(f"connection lost: {exc}" if exc else "the peer closed the link")
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Notes that the transport holds more than its limit."""
        self._is_write_paused = True

    def resume_writing(self) -> None:
        """Notes that the transport takes more again."""
        self._is_write_paused = False

    def _messages(self, data: bytes) -> Iterator[GatewayMessage | EngineMessage]:
        try:
            for body in self._splitter.feed(data):
                yield self._decode(body)
        except (FrameError, msgspec.MsgspecError, RecursionError) as error:
            self.end(f"protocol error: {error}")

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._tick)

    def _tick(self) -> None:
        beat = self._pulse.tick(self._loop.time())
        if beat.is_peer_dead:
            self.end(f"heartbeat missed: nothing heard for {self._heartbeat.timeout_s} s")
            return
        self._beat(is_ping_due=beat.is_ping_due, is_late=beat.is_late)
        if self.is_open:
            self._set_timer(self._pulse.due_at_s)
