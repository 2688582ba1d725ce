"""Has a fork server do what may take too much, and starts it when the first order comes.

Owns that process: it is started again when it has ended. Does not own what the orders are. Used
from one event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from serving.domain.errors import GatewayFaultError, NoTimeForRequestError
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE
from serving.gateway.forks.messages import (
    LENGTH_BYTES,
    ForkLimits,
    ForkOrder,
    ForkOutcome,
    Start,
    framed,
    length_in,
)

logger = logging.getLogger(__name__)

_PROGRAM = "serving.gateway.forks.program"
# Carried out at once, and waiting for that.
_NUM_AT_ONCE, _NUM_WAITING = 2, 32
_NUM_ATTEMPTS = 2
# To import vLLM takes some 10 s of a core, and the process has a low priority: many times that is a
# start that hangs.
_START_S = 300.0
# A fork has one thread, and what libraries think of the others that their parent had is wrong.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _environment() -> dict[str, str]:
    # Below an engine host a process watches it, in a thread that a fork would not have.
    ours = {name: value for name, value in os.environ.items() if name != HOST_VARIABLE}
    return ours | _ENVIRONMENT


class ForkEndedError(Exception):
    """An order was ended at one of its limits, or by what it did. The message names the limits."""


class _ServerGoneError(Exception):
    """The process has ended. Another one may do."""


class ForkServer:
    """Carries out orders of one kind of tasks."""

    def __init__(
        self, name: str, tasks: str, spec: Callable[[], bytes], start_s: float = _START_S
    ) -> None:
        """Starts nothing yet. `name` is logged.

        `tasks` names a function that makes them (`module:name`) of what `spec` returns when the
        process is started, which has `start_s` to be ready.
        """
        self._name = name
        self._tasks = tasks
        self._spec = spec
        self._start_s = start_s
        self._places = asyncio.Semaphore(_NUM_AT_ONCE)
        self._num_waiting = 0
        self._process: _ServerProcess | None = None
        self._starting = asyncio.Lock()
        # Monotonic; when the last start was given up, if one ever was.
        self._gave_up_s = -math.inf

    async def run(self, task: str, payload: bytes, limits: ForkLimits) -> bytes:
        """Returns what came of one order. An order whose caller is cancelled is ended.

        Raises:
            ForkEndedError: it was ended. Whoever sent it should ask for something simpler.
            NoTimeForRequestError: too many wait already, its time was over, or the process did not
                start in time: the machine is busy.
            GatewayFaultError: the process cannot start, ended twice, or failed; it is logged.
        """
        if self._num_waiting >= _NUM_WAITING:
            raise NoTimeForRequestError
        asked_s = time.monotonic()
        self._num_waiting += 1
        try:
            async with self._places:
                for _ in range(_NUM_ATTEMPTS):
                    process = await self._running(asked_s)
                    with contextlib.suppress(_ServerGoneError):
                        outcome = await process.carry_out(task, payload, limits)
                        return self._payload_of(outcome, task, limits)
        finally:
            self._num_waiting -= 1
        logger.error("fork_server_ended_twice name=%s task=%s", self._name, task)
        raise GatewayFaultError

    def close(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    async def wait_closed(self) -> None:
        """Ends the process, and waits until it has ended."""
        process, self._process = self._process, None
        if process is not None:
            await process.wait_closed()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    def _payload_of(self, outcome: ForkOutcome, task: str, limits: ForkLimits) -> bytes:
        if outcome.fault is not None:
            logger.error("fork_failed name=%s task=%s cause=%s", self._name, task, outcome.fault)
            raise GatewayFaultError
        if outcome.payload is None:
            reason = "time" if outcome.is_late else "limits"
            logger.warning("fork_ended name=%s task=%s reason=%s", self._name, task, reason)
            if outcome.is_late:
                raise NoTimeForRequestError
            raise ForkEndedError(str(limits))
        return outcome.payload

    async def _running(self, asked_s: float) -> "_ServerProcess":
        async with self._starting:
            # Whoever has waited through a start that was given up does not wait for another.
            if self._gave_up_s > asked_s:
                raise NoTimeForRequestError
            if self._process is None or self._process.is_over:
                await self.wait_closed()
                start = Start(self._tasks, self._spec())
                try:
                    async with asyncio.timeout(self._start_s):
                        self._process = await _ServerProcess.start(self._name, start)
                except TimeoutError:
                    self._gave_up_s = time.monotonic()
                    logger.error(
                        "fork_server_not_started_in_time name=%s limit_s=%g",
                        self._name,
                        self._start_s,
                    )
                    raise NoTimeForRequestError from None
            return self._process


def _launched(connection: socket.socket) -> "subprocess.Popen[bytes]":
    """Starts the program, which reads and writes one end of a connection.

    Not by the event loop: uvloop forks, which copies the page tables of all that vLLM has loaded.
    With 730 MB that takes 32 to 46 ms, and this 0.5 (2026-11-25).
    """
    return subprocess.Popen(
        [sys.executable, "-m", _PROGRAM],
        stdin=connection.fileno(),
        stdout=connection.fileno(),
        # Libraries print what they were given, and that is a client's.
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=_environment(),
    )


class _ServerProcess:
    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        outcomes: asyncio.StreamReader,
        orders: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._orders = orders
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[ForkOutcome]] = {}
        self.is_over = False
        self._reading = asyncio.create_task(self._read(outcomes), name="read-fork-server")

    @classmethod
    async def start(cls, name: str, start: Start) -> "_ServerProcess":
        """Returns it once it takes orders.

        Raises:
            GatewayFaultError: it does not start; the log says why.
        """
        ours, its = socket.socketpair()
        with its:
            process = _launched(its)
        started = cls(process, *await asyncio.open_connection(sock=ours))
        ready = started._expect(0)
        try:
            started._send(framed(start))
            outcome = await ready
        except _ServerGoneError:
            outcome = ForkOutcome(0, fault="it ended")
        except BaseException:
            started.close()
            raise
        if outcome.fault is not None:
            logger.error("fork_server_does_not_start name=%s problem=%s", name, outcome.fault)
            await started.wait_closed()
            raise GatewayFaultError
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    async def carry_out(self, task: str, payload: bytes, limits: ForkLimits) -> ForkOutcome:
        number = next(self._numbers)
        frame = framed(ForkOrder(number, task, payload, limits))
        await asyncio.sleep(0)  # the frame is copied once more
        outcome = self._expect(number)
        self._send(frame)
        try:
            return await outcome
        except asyncio.CancelledError:
            if not self.is_over:
                self._send(framed(ForkOrder(number)))
            raise

    def close(self) -> None:
        # The task that reads ends with the connection, and then with the process.
        self._process.kill()
        self._orders.close()

    async def wait_closed(self) -> None:
        self.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _expect(self, number: int) -> "asyncio.Future[ForkOutcome]":
        if self.is_over:
            raise _ServerGoneError
        self._open[number] = asyncio.get_running_loop().create_future()
        return self._open[number]

    def _send(self, frame: bytearray) -> None:
        self._orders.write(frame)

    async def _read(self, outcomes: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await outcomes.readexactly(LENGTH_BYTES)
                    record = await outcomes.readexactly(length_in(head))
                    self._tell(msgspec.msgpack.decode(record, type=ForkOutcome))
        finally:
            self.is_over = True
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(_ServerGoneError())
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def _tell(self, outcome: ForkOutcome) -> None:
        waiting = self._open.pop(outcome.number, None)
        # Who waited for it may have left.
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)
