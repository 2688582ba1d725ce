"""The replica's end of a host's stream.

Owns the deadline and the rule by which a host is lost. Does not own what follows from a notice.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from serving.link.heartbeat import HeartbeatConfig, Pulse
from serving.link.tls import ClientTls, tls_reason
from serving.slices.host_heartbeat.connection import LostError, connect_to_agent, unless_silent
from serving.slices.host_heartbeat.lines import HEARTBEAT, LEFT_LINE, MAX_LINE_BYTES, decode_line
from serving.slices.notices import Notice, NoticeKind, NoticeSink

logger = logging.getLogger(__name__)

# How many different reasons for which an address was left are told with a host's loss.
_TROUBLES_TOLD = 3


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
        self._troubles: list[str] = []  # for which an address was left, until one is heard
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
                    before = self._troubles if error.is_silence else []
                    self._announce_lost("; ".join((*before, str(error))))
                    return
                self._note_trouble(str(error))
                if address == self._address:
                    pause_s = self._heartbeat.interval_s
                    continue
                self._address, pause_s = address, 0.0
                self._pulse = Pulse(self._heartbeat, asyncio.get_running_loop().time())

    def _note_trouble(self, trouble: str) -> None:
        """A busy machine's "nobody answers" after "cannot prove itself" hides neither."""
        others = [told for told in self._troubles if told != trouble]
        self._troubles = [*others, trouble][-_TROUBLES_TOLD:]

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
                line = decode_line(raw)
            except OSError as error:
                return tls_reason(error) if isinstance(error, ssl.SSLError) else str(error)
            except ValueError as error:  # undecodable, or a line without end
                raise LostError(f"it sends what no host sends: {error}") from error
            self._pulse.heard_at_s = asyncio.get_running_loop().time()
            self._has_heard = True
            self._troubles.clear()
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
