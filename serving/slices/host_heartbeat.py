"""The stream from a host of a slice to the slice's replica: its heartbeat and its notices.

The host's agent serves it, and the replica connects (`agent_connection`). Beyond loopback both
ends prove the cluster secret first, in TLS: a stranger hears nothing and is not believed. The
stream carries JSON lines: one every 0.25 s, and one with all present notices at once when they
change. One word is read: the replica says at last that it leaves the slice. The end of the stream
is the fastest sign of a lost host: Ray takes 12 to 15 s.

Owns the lines, the deadline and the rule by which a host is lost. Does not own the sources of
notices.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serving.link.heartbeat import HeartbeatConfig, Pulse
from serving.link.listener import LinkListener
from serving.link.tls import ClientTls, TlsEnd, tls_reason
from serving.slices.agent_connection import LostError, connect_to_agent, unless_silent
from serving.slices.notices import Notice, NoticeKind, NoticeSink

logger = logging.getLogger(__name__)

# A host that has ended closes its stream, and is known at once. Silence alone may be a host, or a
# network, that is only slow, and giving a slice up for it costs a load of the model. The engine
# on it is watched more closely, by the link and by the engine host.
HEARTBEAT = HeartbeatConfig(timeout_s=5.0)
# A slice has one replica; an update may have a second one for a moment.
MAX_WATCHERS = 4
# Some hundred notices; a host has a handful of sources.
MAX_LINE_BYTES = 64 * 1024
# What the replica says before it gives the slice back.
LEFT_LINE = b"left\n"
# A watcher that does not read is cut off. Heartbeats alone take more than an hour to get there.
_MAX_UNREAD_BYTES = 64 * 1024


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The line on the stream. `notices` are all present ones; `None` is a mere heartbeat.

    `refused` is set before the server hangs up on one watcher too many.
    """

    notices: tuple[Notice, ...] | None = None
    refused: bool = False


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Line)


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
            transport.write(_encode(_Line(tuple(self._notices.values()), refused=True)))
            transport.close()
        else:
            self._watchers.add(transport)
            transport.write(self._all())

    def drop(self, transport: asyncio.Transport) -> None:
        """Removes a watcher that has left."""
        self._watchers.discard(transport)

    async def _beat(self) -> None:
        beat = _encode(_Line())
        while True:
            await asyncio.sleep(self._heartbeat.interval_s)
            self._send(beat)

    def _all(self) -> bytes:
        return _encode(_Line(tuple(self._notices.values())))

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


class HostWatcher:
    """The replica's end: hands on the notices of one host, and at last its loss.

    `revive` is asked when the stream has ended and cannot be opened again: the agent may have died
    alone. It returns the address of the one in its place, or `None` once the host is gone.
    """

    def __init__(
        self,
        worker_id: int,
        address: tuple[str, int],
        sink: NoticeSink,
        tls: ClientTls,
        heartbeat: HeartbeatConfig = HEARTBEAT,
        revive: Callable[[], Awaitable[tuple[str, int] | None]] | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._address = address
        self._tls = tls
        self._sink = sink
        self._heartbeat = heartbeat
        self._notices: dict[str, Notice] = {}
        self._revive = revive
        self._pulse = Pulse(heartbeat, 0.0)
        self._has_heard = False
        self._trouble = ""  # for which an address was left, until one is heard
        self._writer: asyncio.StreamWriter | None = None
        self._has_left = False

    async def run(self) -> None:
        """Watches until the host is lost, which is then announced, or until it is cancelled.

        A stream that ends is connected once more. If that fails, or who answers is not the agent,
        `revive` decides; without it the host is lost. It is lost as well after
        `heartbeat.timeout_s` of silence, not counting time in which our own event loop stood still.
        An address that `revive` names again is tried again until then.
        """
        silence = f"nothing heard for {self._heartbeat.timeout_s:g} s"
        self._pulse = Pulse(self._heartbeat, asyncio.get_running_loop().time())
        pause_s = 0.0
        while True:
            try:
                await unless_silent(self._pulse, self._follow(pause_s), silence)
            except LostError as error:
                address = await self._next_address(error)
                if address is None:
                    is_explained = error.is_silence and self._trouble
                    self._announce_lost(f"{self._trouble}; {error}" if is_explained else str(error))
                    return
                self._trouble = str(error)
                if address == self._address:
                    pause_s = self._heartbeat.interval_s
                    continue
                self._address, pause_s = address, 0.0
                self._pulse = Pulse(self._heartbeat, asyncio.get_running_loop().time())

    async def _next_address(self, error: LostError) -> tuple[str, int] | None:
        """Returns where to go on listening after `error`; `None`: the host is lost."""
        if self._revive is None or error.is_silence:
            return None
        logger.warning("agent_lost worker_id=%d reason=%r", self._worker_id, str(error))
        return await self._revive()

    def tell_left(self) -> None:
        """Says on the host that its slice is left; whoever waits there for it may end the host."""
        self._has_left = True
        if self._writer is not None:
            self._writer.write(LEFT_LINE)

    def _announce_lost(self, why: str) -> None:
        reason = f"the host is lost: {why}"
        lost = Notice(NoticeKind.HOST_LOST, self._worker_id, None, reason, "host stream")
        self._sink.announce(lost)

    async def _follow(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        while True:
            self._has_heard = False
            reader, writer = await connect_to_agent(self._address, self._tls, MAX_LINE_BYTES)
            self._writer = writer
            try:
                ended = await self._read(reader)
            finally:
                self._writer = None
                if self._has_left:
                    writer.close()  # what was said last arrives
                else:
                    writer.transport.abort()
            if not self._has_heard:
                raise LostError(f"its stream ends at once: {ended}")
            logger.info("host_stream_ended worker_id=%d reason=%r", self._worker_id, ended)

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Hands on the notices of one connection; returns the reason of its end."""
        while True:
            try:
                raw = await reader.readline()
                if not raw.endswith(b"\n"):
                    return "it was closed, and its agent's log says why if it is alive"
                line = _DECODER.decode(raw)
            except OSError as error:
                return tls_reason(error) if isinstance(error, ssl.SSLError) else str(error)
            except ValueError as error:  # undecodable, or a line without end
                raise LostError(f"it sends what no host sends: {error}") from error
            self._pulse.heard_at_s = asyncio.get_running_loop().time()
            self._has_heard, self._trouble = True, ""
            if line.notices is not None:
                self._hand_on(line.notices)
            if line.refused:
                logger.warning("host_stream_refused worker_id=%d", self._worker_id)
                await asyncio.sleep(self._heartbeat.interval_s)
                return "it has too many watchers"

    def _hand_on(self, notices: tuple[Notice, ...]) -> None:
        present = {notice.source: notice for notice in notices}
        for source, notice in present.items():
            if self._notices.get(source) != notice:
                self._sink.announce(notice)
        for source in self._notices.keys() - present.keys():
            self._sink.withdraw(self._worker_id, source)
        self._notices = present


def _encode(line: _Line) -> bytes:
    return _ENCODER.encode(line) + b"\n"
