"""Runs one stage as a process with a hard deadline. Does not own what its messages mean.

A stage that hangs in native code can only be ended from outside, so each has a process group of its
own, which is killed whole. What it has said until then is not lost: messages and output come over
pipes and are handled as they come.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The number of the pipe for messages, for the process that has inherited it.
MESSAGES_VARIABLE = "SLICEWISE_FIRST_RUN_MESSAGES"
PROGRAM = (sys.executable, "-m", "deployments.first_run.child")
_READ_BYTES = 64 * 1024
# Of what a pipe holds at the end; who goes on writing does not keep the run.
_MOST_READS = 256
# How often the callers look at what was printed meanwhile.
_TURN_S = 2.0


@dataclass(frozen=True, slots=True)
class StageEnd:
    """How a stage's process ended. `status` is as `subprocess` has it; `None`: at its deadline."""

    status: int | None
    wall_s: float

    def describe(self, deadline_s: float) -> str:
        """Returns the end in words."""
        if self.status is None:
            return f"it had no result within {deadline_s:g} s and was ended"
        if self.status < 0:
            return f"its process was ended by {signal.Signals(-self.status).name}"
        return f"its process ended with status {self.status} and without a result"


def run_stage_process(
    request: Mapping[str, Any],
    deadline_s: float,
    on_message: Callable[[dict[str, Any]], None],
    on_output: Callable[[str], None],
    program: Sequence[str] = PROGRAM,
) -> StageEnd:
    """Runs `program`, which reads `request` as JSON from its input, until its end or deadline.

    `on_message` is called with each message, `on_output` with what was printed, every few seconds.
    """
    reader, writer = os.pipe()
    started_s = time.monotonic()
    process = subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, MESSAGES_VARIABLE: str(writer)},
        pass_fds=(writer,),
        start_new_session=True,
    )
    os.close(writer)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
        is_over = _read(process, reader, started_s + deadline_s, on_message, on_output)
        status = process.wait() if is_over else None
    finally:
        os.close(reader)
        _end(process)
    return StageEnd(status, time.monotonic() - started_s)


def _read(
    process: subprocess.Popen[bytes],
    messages: int,
    until_s: float,
    on_message: Callable[[dict[str, Any]], None],
    on_output: Callable[[str], None],
) -> bool:
    """Hands over what comes; `False` once the deadline has passed before the process's end.

    What the stage has started may hold the pipes for longer than the stage lives, so its end is
    looked for itself.
    """
    assert process.stdout is not None
    output, line, printed = process.stdout.fileno(), bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(process.pid)
        for source in (output, messages, ended):
            selector.register(source, selectors.EVENT_READ)
        handed_s = time.monotonic()
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(min(left_s, _TURN_S))}
                is_over = ended in ready
                for source, into in ((messages, line), (output, printed)):
                    if source in ready:
                        _take(selector, source, into, is_last=is_over)
                _hand_over(line, on_message)
                if printed and (is_over or time.monotonic() - handed_s > _TURN_S):
                    on_output(printed.decode(errors="replace"))
                    printed.clear()
                    handed_s = time.monotonic()
                if is_over:
                    return True
            return False
        finally:
            # Also when the run is told to end, or the stage's time is over.
            for source, into in ((messages, line), (output, printed)):
                if source in selector.get_map():
                    _take(selector, source, into, is_last=True)
            _hand_over(line, on_message)
            if printed:
                on_output(printed.decode(errors="replace"))
            os.close(ended)


def _take(selector: selectors.BaseSelector, source: int, into: bytearray, *, is_last: bool) -> None:
    """Reads what is there; of a process that has ended, all that it left in the pipe."""
    os.set_blocking(source, False)
    for _ in range(_MOST_READS if is_last else 1):
        try:
            data = os.read(source, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            selector.unregister(source)
            return
        into += data


def _hand_over(line: bytearray, on_message: Callable[[dict[str, Any]], None]) -> None:
    while (end := line.find(b"\n")) >= 0:
        text = bytes(line[:end])
        del line[: end + 1]
        with contextlib.suppress(ValueError):  # cut short by the end of its process
            on_message(json.loads(text))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the stage and what it has started in its group; that has ended when this returns."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
