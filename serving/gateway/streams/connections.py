"""A client's connection, as far as parts of an answer are written to it past the ASGI application.

Owns the framing of such a part (HTTP/1.1, chunked), and when it may be written. Does not own the
answer: its head, its first part and its end are the application's and the server's.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

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

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """Makes the connection of the request that `cycle` answers."""
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @classmethod
    def below(cls, receive: Any) -> "ClientConnection | None":
        """Returns the connection that `receive`, an ASGI callable, reads from.

        `None` if it is none of uvicorn's, or is served by another event loop.
        """
        for _ in range(_MAX_WRAPPERS):
            owner = getattr(receive, "__self__", receive)
            if isinstance(owner, RequestResponseCycle):
                protocol: Any = owner.transport.get_protocol()
                is_ours = getattr(protocol, "loop", None) is asyncio.get_running_loop()
                return cls(owner) if is_ours else None
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

    def write(self, part: bytes) -> None:
        """Writes one part of the answer."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))
