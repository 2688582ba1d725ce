"""A wire between two ends that somebody else reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Wire:
    """A proxy that keeps every byte that goes through it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.seen = bytearray()
        self.address: tuple[str, int]
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(*self._target)
        for source, target in ((reader, to_there), (there, writer)):
            self._tasks.add(asyncio.create_task(self._copy(source, target)))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                self.seen += data
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.transport.abort()

    @asynccontextmanager
    async def tapped(self) -> AsyncIterator["Wire"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = server.sockets[0].getsockname()[:2]
        try:
            yield self
        finally:
            server.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)
