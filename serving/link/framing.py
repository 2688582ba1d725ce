"""Frames: a 4-byte big-endian length, then one msgpack message.

Owns the cut from bytes to message bodies and the bound on one frame. Does not own sockets or the
meaning of a message. Pure: no clock, no I/O, no chance.
"""

import struct
from collections.abc import Iterator

import msgspec

from serving.link.errors import FrameError
from serving.link.messages import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()

# Bounds what a peer that has proved nothing can make us hold; the longest handshake message is a
# `Hello` of about a hundred bytes plus the gateway's name.
MAX_HANDSHAKE_FRAME_BYTES = 4 * 1024


def encode_frame(message: msgspec.Struct) -> bytes:
    """The message as one frame, ready to be written.

    Raises:
        FrameError: it is larger than `MAX_FRAME_BYTES`. Split it, or fail the request it carries.
    """
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        msg = f"frame of {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed"
        raise FrameError(msg)
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
        """The bodies that `data` completes, in order, each cut when it is asked for.

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
