"""Processes of their own that keep what a process with chips keeps, until they are killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path


class Held(StrEnum):
    """What is done with the file; the code that does it."""

    LOCKED = "import fcntl; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    OPEN = "f = open(sys.argv[1], 'r+')"


@contextmanager
def holding(what: Held, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process that holds the file; it does when this begins."""
    code = f"import sys; {what}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), f"it ended before it held {path}"
        try:
            yield process
        finally:
            process.kill()
