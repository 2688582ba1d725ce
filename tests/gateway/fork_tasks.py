"""What the fork server of `test_forks` does. Runs in the program."""

import os
import signal
from pathlib import Path

from serving.gateway.forks.messages import Tasks

# What a spec begins with whose start never ends; then comes the file of `_wait`.
HANGING = b"hanging:"


def tasks(spec: bytes) -> Tasks:
    """Returns the tasks."""
    if spec == b"broken":
        raise ValueError("broken on purpose")
    if spec.startswith(HANGING):
        _wait(spec.removeprefix(HANGING))
    return {
        "echo": lambda payload: spec + payload,
        "spin": _spin,
        "grow": lambda _: bytes(1024 * 1024 * 1024)[:1],
        "fail": _fail,
        "die": lambda _: os.kill(os.getpid(), signal.SIGKILL) or b"",
        "wait": _wait,
        "print": lambda payload: print(payload) or b"printed",  # noqa: T201
    }


def _spin(_: bytes) -> bytes:
    while True:
        pass


def _fail(payload: bytes) -> bytes:
    raise ValueError(payload.decode())


def _wait(payload: bytes) -> bytes:
    """Writes down who it is, and waits until it is killed."""
    Path(payload.decode()).write_text(str(os.getpid()))
    signal.pause()
    return b""
