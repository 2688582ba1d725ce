"""Keeps answers as they come: at once, or together with those of the next seconds.

Lines do not wait until their answers are kept, except for room: so a store that takes some writes a
second holds no line up. What is not kept when a gateway dies is asked again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from serving.gateway.batches.records import LineAnswer


class AnswerWriter:
    """Writes the answers of one batch, one write at a time. Used from one event loop."""

    def __init__(
        self,
        write: Callable[[Sequence[LineAnswer]], Awaitable[None]],
        interval_s: float,
        most_unwritten: int,
    ) -> None:
        """Makes a writer whose writes begin `interval_s` apart at least, but for the last ones."""
        self._write = write
        self._interval_s = interval_s
        self._most_unwritten = most_unwritten
        self._unwritten: list[LineAnswer] = []
        self._under_way: asyncio.Future[None] | None = None
        self._has_some = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def add(self, answer: LineAnswer) -> None:
        """Takes an answer; waits if there are too many already."""
        await self._has_room.wait()
        self._unwritten.append(answer)
        self._has_some.set()
        if len(self._unwritten) >= self._most_unwritten:
            self._has_room.clear()

    async def run(self) -> None:
        """Writes until it is cancelled; a write that is under way then is not."""
        while True:
            await self._has_some.wait()
            pause = asyncio.create_task(asyncio.sleep(self._interval_s))
            try:
                await self._write_some()
                await pause
            finally:
                pause.cancel()

    async def flush(self) -> None:
        """Writes what is left, when `run` has ended. Raises what writing raises."""
        if self._under_way is not None:
            await asyncio.shield(self._under_way)
        if self._unwritten:
            await self._write_some()

    async def _write_some(self) -> None:
        answers, self._unwritten = self._unwritten, []
        self._has_some.clear()
        self._has_room.set()
        self._under_way = asyncio.ensure_future(self._write(answers))
        await asyncio.shield(self._under_way)
        self._under_way = None
