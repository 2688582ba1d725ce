"""The lines of a batch's file that have no answer, in the order in which they are asked."""

import asyncio
from collections.abc import Collection, Iterator
from typing import BinaryIO

from serving.domain.limits import MIB
from serving.gateway.batches.lines import (
    BatchLine,
    LineLimits,
    ReadLine,
    RefusedLine,
    line_or_refusal,
    numbered,
)
from serving.gateway.batches.running.threads import Blocking

# Lines that are read from the file at once; fewer, if they have so many bytes.
_LINES_AT_ONCE = 64
_BYTES_AT_ONCE = 4 * MIB


class LineSource:
    """Hands out the lines of a file, which is read a few lines ahead. Used from one event loop."""

    def __init__(
        self,
        content: BinaryIO,
        endpoint: str,
        limits: LineLimits,
        answered: Collection[int],
        blocking: Blocking,
        read: ReadLine = line_or_refusal,
    ) -> None:
        """Takes the content of a file that has been checked; `answered` are numbers of lines."""
        self._lines = _open_lines(content, endpoint, limits, answered, read)
        self._blocking = blocking
        self._read: list[BatchLine | RefusedLine] = []  # the next one last
        self._reading = asyncio.Lock()

    async def next(self) -> BatchLine | RefusedLine | None:
        """Returns the next line; `None` if there is none."""
        async with self._reading:
            if not self._read:
                self._read = await self._blocking(self._read_some)
            return self._read.pop() if self._read else None

    def _read_some(self) -> list[BatchLine | RefusedLine]:
        read: list[BatchLine | RefusedLine] = []
        num_bytes = 0
        while len(read) < _LINES_AT_ONCE and num_bytes < _BYTES_AT_ONCE:
            line = next(self._lines, None)
            if line is None:
                break
            read.append(line)
            num_bytes += len(line.body) if isinstance(line, BatchLine) else 0
        return read[::-1]


def _open_lines(
    content: BinaryIO,
    endpoint: str,
    limits: LineLimits,
    answered: Collection[int],
    read: ReadLine,
) -> Iterator[BatchLine | RefusedLine]:
    for number, line in numbered(content, limits):
        if number not in answered:
            yield read(number, line, endpoint, limits)
