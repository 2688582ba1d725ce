"""A client's connection, as far as parts of an answer are written to it past the ASGI application.

Owns the framing of such a part (HTTP/1.1, chunked), when it may be written, and the end of a client
that leaves too much unread. Does not own the answer: its head, its first part and its end are the
application's and the server's.
"""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serving.gateway.streams.unread import UnreadAnswers

logger = logging.getLogger(__name__)

# The server's `receive` lies below as many wrappers: Serve's and the edge's.
_MAX_WRAPPERS = 4


class _KeptWrites:
    """Stands for a transport while parts of an answer are to be written together."""

    __slots__ = ("_parts", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def write(self, part: bytes) -> None:
        """Keeps a part."""
        self._parts.append(part)

    def flush(self) -> None:
        """Writes what was kept."""
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Closes the transport behind what was kept."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ClientConnection:
    """Writes to one client between two parts that its application sends."""

    __slots__ = ("_cycle", "_flow", "_request_id", "_unread", "_write", "num_waiting", "was_ended")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        unread: UnreadAnswers["ClientConnection"],
        request_id: str,
    ) -> None:
        """Makes the connection of the request that `cycle` answers."""
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._unread = unread
        self._request_id = request_id
        self.num_waiting = 0  # bytes of the answer that are behind a full connection
        self.was_ended = False  # because too much of the answer was unread

    @classmethod
    def below(
        cls, receive: Any, unread: UnreadAnswers["ClientConnection"], request_id: str
    ) -> "ClientConnection | None":
        """Returns the connection that `receive`, an ASGI callable, reads from.

        `None` if it is none of uvicorn's, or is served by another event loop.
        """
        for _ in range(_MAX_WRAPPERS):
            owner = getattr(receive, "__self__", receive)
            if isinstance(owner, RequestResponseCycle):
                protocol: Any = owner.transport.get_protocol()
                is_ours = getattr(protocol, "loop", None) is asyncio.get_running_loop()
                return cls(owner, unread, request_id) if is_ours else None
            receive = getattr(owner, "_receive", None)
        return None

    def keep(self) -> None:
        """Keeps what the server writes of the answer, until `flush`, which has to follow.

        The server writes an answer's head by itself and its first part after it; that is two ways
        through the kernel here, and through each proxy behind.
        """
        self._cycle.transport = _KeptWrites(self._cycle.transport)  # type: ignore[assignment]

    def flush(self) -> None:
        """Writes what was kept; without effect if nothing is."""
        kept = self._cycle.transport
        if isinstance(kept, _KeptWrites):
            self._cycle.transport = kept._transport
            kept.flush()

    @property
    def is_open(self) -> bool:
        """True if the answer has begun, in chunks, and is not whole."""
        cycle = self._cycle
        has_begun = cycle.response_started and not cycle.response_complete
        return has_begun and bool(cycle.chunked_encoding) and not cycle.disconnected

    @property
    def has_left(self) -> bool:
        """True if the client is gone."""
        return self._cycle.disconnected

    @property
    def is_full(self) -> bool:
        """True if the client does not read: more than the server's buffer (64 KiB) is unsent."""
        return self._flow.write_paused

    def waits(self, num_bytes: int) -> None:
        """Notes how much of the answer waits, in bytes of memory, because the connection is full.

        With what waits in the server's buffer it may be more than a client may leave unread. Then
        the connection is ended, of this client or of one that has left more; whoever answers there
        sees that the client has left.
        """
        self.num_waiting = num_bytes
        unsent = self._cycle.transport.get_write_buffer_size()
        ended = self._unread.note(self, unsent + num_bytes)
        if ended is not None:
            ended._end()

    def caught_up(self) -> None:
        """Notes that nothing waits any more, or that the answer has ended."""
        self.num_waiting = 0
        # Also one whose buffer alone was counted: an output may have nothing that waits.
        self._unread.forget(self)

    def _end(self) -> None:
        self.was_ended = True
        logger.warning(
            "client_does_not_read request_id=%s unread_bytes=%d: connection ended",
            self._request_id, self.num_waiting,
        )  # fmt: skip
        self._cycle.transport.abort()

    def write(self, part: bytes) -> None:
        """Writes one part of the answer."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))
