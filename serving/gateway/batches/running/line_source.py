"""The lines of a batch's file that have no answer, in the order in which they are asked."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from serving.domain.limits import MIB
from serving.gateway.batches.lines import (
    BatchLine,
    LineLimits,
    ReadLine,
    RefusedLine,
    line_at,
    line_or_refusal,
    placed,
)
from serving.gateway.batches.running.threads import Blocking

# Lines that are read from the file at once; fewer, if they have so many bytes.
_LINES_AT_ONCE = 64
_BYTES_AT_ONCE = 4 * MIB


@dataclass(frozen=True, slots=True)
class PlacedLine:
    """A line, and the byte of its file at which it begins."""

    begin: int
    line: BatchLine | RefusedLine


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
        self._content = content
        self._endpoint = endpoint
        self._limits = limits
        self._read_line = read
        self._lines = (each for each in placed(content, limits) if each[0] not in answered)
        self._blocking = blocking
        self._read: list[PlacedLine] = []  # the next one last
        self._reading = asyncio.Lock()

    async def next(self) -> PlacedLine | None:
        """Returns the next line; `None` if there is none."""
        async with self._reading:
            if not self._read:
                read = await self._blocking(self._read_some, self._lines)
                self._read = read[::-1]
            return self._read.pop() if self._read else None

    async def read_again(self, places: Sequence[tuple[int, int]]) -> list[PlacedLine]:
        """Returns lines by their numbers and where they begin: the first of them, one at least."""
        async with self._reading:
            read: list[PlacedLine] = await self._blocking(self._read_places, places)
            return read

    # -- in a thread --

    def _read_places(self, places: Sequence[tuple[int, int]]) -> list[PlacedLine]:
        goes_on_at = self._content.tell()
        try:
            lines = (
                (number, begin, line_at(self._content, number, begin, self._limits))
                for number, begin in places
            )
            return self._read_some(lines)
        finally:
            self._content.seek(goes_on_at)

    def _read_some(self, lines: Iterator[tuple[int, int, bytes]]) -> list[PlacedLine]:
        read: list[PlacedLine] = []
        num_bytes = 0
        while len(read) < _LINES_AT_ONCE and num_bytes < _BYTES_AT_ONCE:
            found = next(lines, None)
            if found is None:
                break
            number, begin, text = found
            num_bytes += len(text)
            line = self._read_line(number, text, self._endpoint, self._limits)
            read.append(PlacedLine(begin, line))
        return read
