"""Keeps answers as they come: at once, or together with those of the next seconds.

Lines do not wait until their answers are kept, except for room: so a store that takes few writes
holds no line up. What is not kept when a gateway dies is asked again.
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
        most_bytes: int,
    ) -> None:
        """Makes a writer whose writes begin `interval_s` apart at least, but for the last ones.

        Lines wait while `most_unwritten` answers have not begun to be written, or `most_bytes` of
        them are not written. One write has as many bytes at most, or one answer.
        """
        self._write = write
        self._interval_s = interval_s
        self._most_unwritten = most_unwritten
        self._most_bytes = most_bytes
        self._unwritten: list[LineAnswer] = []
        self._num_bytes = 0  # of what is not written, and of what is being written
        self._under_way: asyncio.Future[None] | None = None
        self._has_some = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def add(self, answer: LineAnswer) -> None:
        """Takes an answer, and then waits while there are too many, or too many bytes of them.

        It is taken though the caller is cancelled while it waits.
        """
        self._unwritten.append(answer)
        self._num_bytes += len(answer.record)
        self._tell()
        await self._has_room.wait()

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
        while self._unwritten:
            await self._write_some()

    async def _write_some(self) -> None:
        answers = self._take()
        self._under_way = asyncio.ensure_future(self._write(answers))
        await asyncio.shield(self._under_way)
        self._under_way = None
        self._num_bytes -= _num_bytes(answers)
        self._tell()

    def _take(self) -> Sequence[LineAnswer]:
        """Takes what one write has, in the order in which it came."""
        end = 1
        left_bytes = self._most_bytes - len(self._unwritten[0].record)
        for answer in self._unwritten[1:]:
            left_bytes -= len(answer.record)
            if left_bytes < 0:
                break
            end += 1
        answers, self._unwritten = self._unwritten[:end], self._unwritten[end:]
        self._tell()
        return answers

    def _tell(self) -> None:
        """Wakes who waits for answers to write, or for room."""
        has_room = (
            len(self._unwritten) < self._most_unwritten and self._num_bytes < self._most_bytes
        )
        for event, holds in ((self._has_some, bool(self._unwritten)), (self._has_room, has_room)):
            if holds:
                event.set()
            else:
                event.clear()


def _num_bytes(answers: Sequence[LineAnswer]) -> int:
    return sum(len(answer.record) for answer in answers)
