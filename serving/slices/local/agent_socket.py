"""The agent's end of the local way: reads the notes of its host and announces what is in them.

Owns the socket, the reading of notes, and the word to those who wait for the slice to be left. Does
not own what a notice means (`notices`).
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from serving.slices.local.notes import LEFT, MAX_NOTE_BYTES, SEEN, agent_listener, read_notes
from serving.slices.notices import Notice, NoticeKind, NoticeSink

logger = logging.getLogger(__name__)

# A preStop hook, a node reader, and somebody who looks.
MAX_CALLERS = 16
MAX_NOTES = 16


class ToldNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A notice in a note: `Notice` without the host, which the agent knows."""

    kind: NoticeKind
    reason: str
    source: str
    deadline_s: float | None = None


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    notices: tuple[ToldNotice, ...]


_NOTE = msgspec.json.Decoder(_Note)


class AgentSocket:
    """Reads the notes of `run_dir` at its start and at every call, into `sink`."""

    def __init__(self, run_dir: Path, worker_id: int, sink: NoticeSink) -> None:
        self._run_dir = run_dir
        self._worker_id = worker_id
        self._sink = sink
        self._sources: dict[str, frozenset[str]] = {}  # of the notices of each note
        self._callers: set[asyncio.Transport] = set()
        self._server: asyncio.AbstractServer | None = None
        self._has_left = False

    async def listen(self) -> None:
        """Reads what was told before, and can be called from now on.

        Raises:
            OSError: the run directory cannot be written.
        """
        listener = agent_listener(self._run_dir, f"{os.getpid()}")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Caller(self), sock=listener)
        self.look()

    def look(self) -> None:
        """Announces what the notes say now, and withdraws what none of them says any more.

        A note that makes no sense is logged, and what it said before stands.
        """
        notes = read_notes(self._run_dir)
        if len(notes) > MAX_NOTES:
            logger.warning("notes_ignored found=%d most=%d", len(notes), MAX_NOTES)
        for name, text in list(notes.items())[:MAX_NOTES]:
            try:
                told = _decode(text)
            except ValueError as error:
                logger.warning("note_unreadable note=%s reason=%r", name, str(error))
                continue
            self._take(name, told)
        for name in self._sources.keys() - notes.keys():
            self._take(name, ())

    def tell_left(self) -> None:
        """Tells everybody who has called, and whoever calls later, that the slice was left."""
        self._has_left = True
        for caller in list(self._callers):
            caller.write(LEFT)

    async def close(self) -> None:
        """Stops listening, and ends all connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for caller in list(self._callers):
                caller.abort()
            await server.wait_closed()

    def add(self, caller: asyncio.Transport) -> None:
        """Answers a caller, after having read the notes."""
        if len(self._callers) >= MAX_CALLERS:
            caller.abort()
            return
        self._callers.add(caller)
        self.look()
        caller.write(SEEN + LEFT if self._has_left else SEEN)

    def drop(self, caller: asyncio.Transport) -> None:
        """Forgets a caller that has gone."""
        self._callers.discard(caller)

    def _take(self, name: str, told: Iterable[ToldNotice]) -> None:
        now_s = time.time()
        notices = [
            Notice(each.kind, self._worker_id, each.deadline_s, each.reason, each.source)
            for each in told
            if not _is_of_another_host(each, now_s)
        ]
        for notice in notices:
            self._sink.announce(notice)
        sources = frozenset(notice.source for notice in notices)
        for source in self._sources.get(name, frozenset()) - sources:
            self._sink.withdraw(self._worker_id, source)
        self._sources[name] = sources


class _Caller(asyncio.Protocol):
    """The connection of one program on the host. What it sends is not read: its note has it."""

    def __init__(self, agent: AgentSocket) -> None:
        self._agent = agent
        self._transport: Any = None  # uvloop's transports are no subclass of asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._agent.add(self._transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._agent.drop(self._transport)


def _is_of_another_host(told: ToldNotice, now_s: float) -> bool:
    """Returns whether this host would be gone: outside of pods the folder outlives its host."""
    is_end = told.kind == NoticeKind.TERMINATION_SIGNAL
    return is_end and told.deadline_s is not None and told.deadline_s < now_s


def _decode(text: bytes) -> tuple[ToldNotice, ...]:
    """Returns the notices of a note.

    Raises:
        ValueError: it is no note.
    """
    if len(text) > MAX_NOTE_BYTES:
        raise ValueError(f"more than {MAX_NOTE_BYTES} bytes")
    return _NOTE.decode(text).notices
