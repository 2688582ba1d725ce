"""A named pipe by which processes below an engine host report lines to it.

Its path is in the environment that they inherit. A process on another host of the slice has no such
pipe, and its reports go nowhere. Owns both ends. Does not own the meaning of a line.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_READ_BYTES = 4096
# A line of less bytes than a pipe writes at once does not mix with another's (pipe(7)).
_MAX_LINE_BYTES = 512


class ReportPipe:
    """The host's end: hands on the lines of all processes that are started while it is open."""

    def __init__(self, variable: str, on_line: Callable[[str], None]) -> None:
        """Opens it, and names it in this process's environment; `on_line` runs in the loop."""
        self._variable, self._on_line = variable, on_line
        self._folder = tempfile.mkdtemp(prefix="slicewise-report-")
        path = Path(self._folder) / "pipe"
        os.mkfifo(path, 0o600)
        # Opened for both ways, it does not end when the last writer closes it.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = ""  # of a line that was read in part
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self.read)
        os.environ[variable] = f"{path}"

    def read(self) -> None:
        """Hands on what was written up to now, without waiting for the loop."""
        with suppress(BlockingIOError):
            while True:
                read = os.read(self._pipe, _READ_BYTES).decode("ascii", "replace")
                *lines, self._rest = (self._rest + read).split("\n")
                for line in lines:
                    self._on_line(line)

    def close(self) -> None:
        """Hands on what was written while the loop was busy, and ends the pipe. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._pipe)
        self.read()
        os.environ.pop(self._variable, None)
        os.close(self._pipe)
        shutil.rmtree(self._folder, ignore_errors=True)


def report_line(variable: str, line: str) -> None:
    """Reports to the engine host; does nothing if none listens: no work may fail because of it."""
    path = os.environ.get(variable)
    if path is None:
        return
    written = line.encode("ascii", "replace").replace(b"\n", b" ")[:_MAX_LINE_BYTES]
    with suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, written + b"\n")
        finally:
            os.close(pipe)
