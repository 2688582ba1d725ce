"""Receives SIGTERM and SIGINT in a process of Ray's that does not look for them.

The main thread of a Ray worker waits in C++, where Python runs no handler. So an actor that is
asked to end goes on until Ray calls one of its methods, and then answers no call any more: its
engine serves, and nobody can drain it. `faulthandler` works the moment a signal comes, in any
thread: it writes a traceback into a socket here, which the actor's event loop reads.

Owns the sockets. Does not own the consequences of a signal: the engine host does (`host_actor`).
"""

import asyncio
import contextlib
import faulthandler
import signal
import socket
from collections.abc import Callable

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_MAX_TRACEBACK_BYTES = 64 * 1024


class EndSignals:
    """Calls back from the running event loop when an end signal comes to this process.

    One per process, until `close`. The previous handler is not called meanwhile: Ray's handler
    would make the next call of a method end the actor half-way. A signal that is blocked in all
    threads is not received.
    """

    def __init__(self, on_end: Callable[[signal.Signals], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = contextlib.ExitStack()
        for number in END_SIGNALS:
            self._listen(number, on_end)

    def close(self) -> None:
        """Stops receiving, and restores the previous handlers of the signals. Idempotent."""
        self._open.close()

    def _listen(self, number: signal.Signals, on_end: Callable[[signal.Signals], None]) -> None:
        ours, theirs = (self._open.enter_context(end) for end in socket.socketpair())
        for end in (ours, theirs):
            end.settimeout(0)  # nobody waits in a signal handler

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                ours.recv(_MAX_TRACEBACK_BYTES)
            on_end(number)

        self._loop.add_reader(ours, read)
        self._open.callback(self._loop.remove_reader, ours)
        faulthandler.register(number, file=theirs, all_threads=False, chain=False)
        self._open.callback(faulthandler.unregister, number)
