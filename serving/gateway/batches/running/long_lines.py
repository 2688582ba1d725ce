"""Long lines of batches are read in forks: a line is JSON, and what reads it holds all threads up.

A line of 16 MiB takes tenths of a second, in which a gateway would send no token. Short ones are
read where they are. Does not own what a line may be (`lines`).
"""

import asyncio

import msgspec

from serving.gateway.batches.lines import (
    BatchLine,
    LineLimits,
    RefusedLine,
    first_custom_id_of,
    line_or_refusal,
)
from serving.gateway.forks.bodies.sizes import LARGE_BYTES
from serving.gateway.forks.messages import ForkLimits, Tasks
from serving.gateway.forks.server import ForkEndedError, ForkServer

READ = "read"
# The worst 16 MiB take two seconds. Nobody waits for one line, so a busy machine may take its time.
FORK_LIMITS = ForkLimits(cpu_s=20, wall_s=300.0, memory_bytes=2 * 1024 * 1024 * 1024)


class _Order(msgspec.Struct, frozen=True):
    number: int
    line: bytes
    endpoint: str
    max_line_bytes: int


class _Request(msgspec.Struct, frozen=True, tag=True):
    """A line that is a request. Where its body is, and not the body: that is in the line."""

    custom_id: str
    begin: int
    end: int
    model: str | None


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    custom_id: str
    code: str
    message: str
    param: str | None


_ORDER = msgspec.msgpack.Decoder(_Order)
_TOLD = msgspec.msgpack.Decoder(_Request | _Refusal)


class LongLines:
    """Reads lines for the threads of one gateway's batches."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fork_limits: ForkLimits = FORK_LIMITS
    ) -> None:
        """Starts nothing yet: the first long line starts the process, which belongs to `loop`."""
        self._loop = loop
        self._fork_limits = fork_limits
        self._forks = ForkServer("long lines of batches", f"{__name__}:tasks", bytes)

    def read(
        self, number: int, line: bytes, endpoint: str, limits: LineLimits
    ) -> BatchLine | RefusedLine:
        """Does what `line_or_refusal` does. Blocks, so it is never called on the event loop.

        Raises:
            RequestError: the process that reads does not start, ended twice, or failed, or the
                machine is too busy. Nothing is known of the line; try again later.
        """
        if len(line) <= LARGE_BYTES:
            return line_or_refusal(number, line, endpoint, limits)
        order = msgspec.msgpack.encode(_Order(number, line, endpoint, limits.max_line_bytes))
        reading = self._forks.run(READ, order, self._fork_limits)
        try:
            told = _TOLD.decode(asyncio.run_coroutine_threadsafe(reading, self._loop).result())
        except ForkEndedError as ended:
            custom_id = first_custom_id_of(number, line)
            message = f"The line cannot be read within {ended}. Divide it."
            return RefusedLine(number, custom_id, "line_too_complex", message)
        if isinstance(told, _Refusal):
            return RefusedLine(number, told.custom_id, told.code, told.message, told.param)
        return BatchLine(number, told.custom_id, line[told.begin : told.end], told.model)

    @property
    def pid(self) -> int | None:
        """The process that reads, if there is one."""
        return self._forks.pid

    async def wait_closed(self) -> None:
        """Ends the process, and waits until it has ended."""
        await self._forks.wait_closed()


def tasks(_spec: bytes) -> Tasks:
    """Returns what the fork server does."""
    return {READ: _read}


def _read(payload: bytes) -> bytes:
    order = _ORDER.decode(payload)
    # The number of lines is of no matter for one of them.
    limits = LineLimits(max_lines=1, max_line_bytes=order.max_line_bytes)
    found = line_or_refusal(order.number, order.line, order.endpoint, limits)
    if isinstance(found, RefusedLine):
        refusal = _Refusal(found.custom_id, found.code, found.message, found.param)
        return msgspec.msgpack.encode(refusal)
    begin = order.line.index(found.body)  # where the same bytes are first is as well
    end = begin + len(found.body)
    return msgspec.msgpack.encode(_Request(found.custom_id, begin, end, found.model))
