"""The host's end of its stream: sends heartbeats and notices to whoever may watch the host.

Owns the watchers that are let in, and how many. Does not own the sources of notices.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from serving.link.heartbeat import HeartbeatConfig
from serving.link.listener import LinkListener
from serving.link.tls import TlsEnd
from serving.slices.host_heartbeat.lines import HEARTBEAT, LEFT_LINE, StreamLine, encode_line
from serving.slices.notices import Notice

# A slice has one replica; an update may have a second one for a moment.
MAX_WATCHERS = 4
# A watcher that does not read is cut off. Heartbeats alone take more than an hour to get there.
_MAX_UNREAD_BYTES = 64 * 1024


class HostStreamServer:
    """The host's end: a `NoticeSink` that sends each notice to every watcher at once.

    `tls` is what watchers prove themselves by; `None`: the address is this machine's alone, or the
    network is in others' charge. `on_left` is called when a watcher says that the slice is left.
    """

    def __init__(
        self,
        worker_id: int,
        tls: TlsEnd | None,
        heartbeat: HeartbeatConfig = HEARTBEAT,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker_id = worker_id
        self._heartbeat = heartbeat
        self.on_left = on_left
        self._notices: dict[str, Notice] = {}
        self._watchers: set[asyncio.Transport] = set()
        self._listener = LinkListener(lambda _: _Watcher(self), tls, "host stream")
        self._beating: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Serves the stream on `port` or a free one; returns the address to connect to."""
        await self._listener.listen(host, port)
        self._beating = asyncio.create_task(self._beat(), name="host-stream-beat")
        return self._listener.address

    async def close(self) -> None:
        """Ends the server and all its streams, so the watchers find the host gone. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
            self._beating = None
        self._listener.close()
        for transport in list(self._watchers):
            transport.abort()
        await self._listener.wait_closed()

    def announce(self, notice: Notice) -> None:
        """Sends the notice to every present and future watcher."""
        assert notice.worker_id == self._worker_id, "a notice of another host"
        if self._notices.get(notice.source) != notice:
            self._notices[notice.source] = notice
            self._send(self._all())

    def withdraw(self, worker_id: int, source: str) -> None:
        """Removes a notice that no longer holds, for every watcher."""
        assert worker_id == self._worker_id, "a notice of another host"
        if self._notices.pop(source, None) is not None:
            self._send(self._all())

    def add(self, transport: asyncio.Transport) -> None:
        """Adds a watcher, if there is room, and sends it the present notices."""
        if len(self._watchers) >= MAX_WATCHERS:
            transport.write(encode_line(StreamLine(tuple(self._notices.values()), refused=True)))
            transport.close()
        else:
            self._watchers.add(transport)
            transport.write(self._all())

    def drop(self, transport: asyncio.Transport) -> None:
        """Removes a watcher that has left."""
        self._watchers.discard(transport)

    async def _beat(self) -> None:
        beat = encode_line(StreamLine())
        while True:
            await asyncio.sleep(self._heartbeat.interval_s)
            self._send(beat)

    def _all(self) -> bytes:
        return encode_line(StreamLine(tuple(self._notices.values())))

    def _send(self, line: bytes) -> None:
        for transport in list(self._watchers):
            if transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                transport.abort()
            else:
                transport.write(line)


class _Watcher(asyncio.Protocol):
    """The connection of one watcher at the host's end. All but one word is thrown away."""

    def __init__(self, server: HostStreamServer) -> None:
        self._server = server
        self._heard = b""
        self._transport: Any = None  # uvloop's transports are no subclass of asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.add(self._transport)

    def data_received(self, data: bytes) -> None:
        heard = self._heard + data
        if heard.endswith(LEFT_LINE):
            self._server.on_left()
        self._heard = heard[-len(LEFT_LINE) :]

    def connection_lost(self, _: Exception | None) -> None:
        self._server.drop(self._transport)
