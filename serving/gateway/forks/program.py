"""A fork server: carries out orders, each in a fork of its own with limits. A program.

To import vLLM and read a tokenizer takes seconds. Here that is done once; a fork takes some
hundredths. It ends at its limits of processor time and memory, and is killed when it takes too long
or its order is withdrawn. Orders come as frames on the input, outcomes go to the output. One
thread, so it may fork. Ends with its input, and its forks with it.
"""

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import resource
import selectors
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass

from serving.gateway.forks.messages import (
    ForkLimits,
    ForkOrder,
    ForkOutcome,
    Start,
    Tasks,
    framed,
    taken,
)

_READ_BYTES = 1024 * 1024
_PR_SET_PDEATHSIG = 1
_NICENESS = 10
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Fork:
    """One order under way. `until_s` is when it is killed (monotonic), which makes it late."""

    number: int
    pid: int
    output: int
    until_s: float
    written: bytearray
    is_late: bool = False


class ForkServerProgram:
    """Carries out orders until there are no more."""

    def __init__(self, tasks: Tasks, orders: int, outcomes: int) -> None:
        self._tasks = tasks
        self._orders = orders
        self._outcomes = outcomes
        self._forks: dict[int, _Fork] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, begun: bytearray) -> None:
        """Reads orders, of which `begun` has been read before."""
        self._selector.register(self._orders, selectors.EVENT_READ)
        pending, is_over = begun, False
        while not is_over:
            while (order := taken(pending, ForkOrder)) is not None:
                self._take(order)
            for key, _ in self._selector.select(self._patience_s()):
                if key.fd == self._orders:
                    read = os.read(self._orders, _READ_BYTES)
                    pending += read
                    is_over |= not read
                else:
                    self._read(self._forks[key.fd])
            self._kill_late()
        for fork in self._forks.values():
            _kill(fork.pid)

    def _patience_s(self) -> float | None:
        if not self._forks:
            return None
        first_s = min(fork.until_s for fork in self._forks.values())
        return max(0.0, first_s - time.monotonic())

    def _take(self, order: ForkOrder) -> None:
        if order.task is not None and order.limits is not None:
            self._begin(order, order.limits)
            return
        for fork in self._forks.values():
            if fork.number == order.number:
                _kill(fork.pid)

    def _begin(self, order: ForkOrder, limits: ForkLimits) -> None:
        read, written = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._carry_out(order, limits, written, parent)
        os.close(written)
        until_s = time.monotonic() + limits.wall_s
        self._forks[read] = _Fork(order.number, pid, read, until_s, bytearray())
        self._selector.register(read, selectors.EVENT_READ)

    def _read(self, fork: _Fork) -> None:
        chunk = os.read(fork.output, _READ_BYTES)
        fork.written += chunk
        if chunk:
            return
        self._selector.unregister(fork.output)
        os.close(fork.output)
        del self._forks[fork.output]
        os.waitpid(fork.pid, 0)
        # A fork that was ended says nothing, or not all of it.
        outcome = taken(fork.written, ForkOutcome)
        if outcome is None:
            outcome = ForkOutcome(fork.number, is_late=fork.is_late)
        _write(self._outcomes, framed(outcome))

    def _kill_late(self) -> None:
        for fork in self._forks.values():
            if fork.until_s <= time.monotonic():
                fork.is_late = True
                _kill(fork.pid)

    def _carry_out(self, order: ForkOrder, limits: ForkLimits, output: int, parent: int) -> None:
        """In a fork: does the work, tells its parent, and ends."""
        try:
            _end_with(parent)
            # Whoever reads the outcomes has to see that the program has ended.
            os.close(self._outcomes)
            os.close(self._orders)
            _limit(limits)
            _write(output, framed(self._outcome_of(order)))
        finally:
            # Whatever happened: what follows is the parent's.
            os._exit(0)

    def _outcome_of(self, order: ForkOrder) -> ForkOutcome:
        try:
            return ForkOutcome(order.number, self._tasks[str(order.task)](order.payload))
        except (MemoryError, RecursionError):
            return ForkOutcome(order.number)
        except BaseException as error:  # noqa: BLE001 # of which the words may be a client's
            return ForkOutcome(order.number, fault=_place_of(error))


def _place_of(error: BaseException) -> str:
    """Returns what kind of error it is, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{type(error).__name__} in {frame.name} ({place})"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Has the kernel end this process when its parent ends, or ends it, if that has happened."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit(limits: ForkLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most_bytes = size_bytes + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _write(output: int, frame: bytes | bytearray) -> None:
    with memoryview(frame) as view:
        at = 0
        while at < len(frame):
            at += os.write(output, view[at:])


def _first(orders: int) -> tuple[Start, bytearray]:
    """Returns the first frame, and what was read after it."""
    read = bytearray()
    while (start := taken(read, Start)) is None:
        chunk = os.read(orders, _READ_BYTES)
        if not chunk:
            raise SystemExit
        read += chunk
    return start, read


def _made(start: Start) -> Tasks:
    module, _, name = start.tasks.partition(":")
    tasks: Tasks = getattr(importlib.import_module(module), name)(start.spec)
    if threading.active_count() != 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        raise RuntimeError(f"{start.tasks} has started threads, and would fork without: {names}")
    return tasks


def main() -> None:
    """Reads a `Start`, then orders."""
    orders, outcomes = os.dup(sys.stdin.fileno()), os.dup(sys.stdout.fileno())
    # Streams come first: the gateway that waits for these outcomes has a loop to turn.
    os.nice(_NICENESS)
    # What is printed would stand between the outcomes.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start, rest = _first(orders)
    try:
        tasks = _made(start)
    except Exception:  # noqa: BLE001 # told to who began it
        _write(outcomes, framed(ForkOutcome(0, fault=traceback.format_exc())))
        return
    # Libraries log what they were given, and that is a client's.
    logging.disable(logging.CRITICAL)
    # A collection in a fork would copy every page.
    gc.freeze()
    _write(outcomes, framed(ForkOutcome(0, b"")))
    ForkServerProgram(tasks, orders, outcomes).run(rest)


if __name__ == "__main__":
    main()
