"""What an engine's processes report to their host while it serves: programs they compile, and ends.

A step that compiles a program does not answer for as long as that takes, and is no hang. And that a
worker on another host has ended is known first to the executor, in the engine core. Owns the words
on the pipe, and which programs are being compiled. Does not own what follows (`engine.host`), nor
how a worker on another host reaches the pipe (`remote_reports`).
"""

import logging
import os
from collections.abc import Callable

from serving.engine.report_pipe import ReportPipe, report_line

logger = logging.getLogger(__name__)

REPORTS_VARIABLE = "SLICEWISE_WORKER_REPORTS_PIPE"
_COMPILING, _COMPILED, _ENDED = "compiling", "compiled", "ended"


class WorkerReports:
    """The host's end, open for as long as the engine is there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Opens it. `clock` is in seconds."""
        self._clock = clock
        # Gets, in the event loop, the reason of a worker's end.
        self.on_worker_ended: Callable[[str], None] | None = None
        self._compiling: dict[tuple[str, str], None] = {}  # process and program
        self._last: tuple[str, float] | None = None  # the last program that was done, and when
        self._pipe = ReportPipe(REPORTS_VARIABLE, self._on_line)

    def compiling(self, since_s: float) -> str | None:
        """Returns a program that is being compiled, or was so at some time since `since_s`."""
        if self._compiling:
            return next(iter(self._compiling))[1]
        if self._last is not None and self._last[1] >= since_s:
            return self._last[0]
        return None

    def read(self) -> None:
        """Takes in what was reported up to now."""
        self._pipe.read()

    def close(self) -> None:
        """Ends it. No report comes afterwards."""
        self._pipe.close()

    def _on_line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        process, _, program = rest.partition(" ")
        if word == _ENDED and self.on_worker_ended is not None:
            self.on_worker_ended(rest)
        elif word == _COMPILING:
            self._compiling[process, program] = None
        elif word == _COMPILED:
            self._compiling.pop((process, program), None)
            self._last = (program, self._clock())


class LineReader:
    """Takes the lines of a worker on another host, and reports for it in the worker's name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: dict[str, None] = {}  # programs

    def take(self, line: str) -> None:
        """Reports what a line says; one that says nothing known is left out."""
        word, _, rest = line.partition(" ")
        _, _, program = rest.partition(" ")
        if word == _COMPILING:
            self._open[program] = None
        elif word == _COMPILED:
            self._open.pop(program, None)
            # As the worker logs it on its own host, of which whoever reads here may not think.
            logger.warning("compiled_on_another_host worker=%s program=%s", self._name, program)
        else:
            return
        self._report(word, program)

    def end(self) -> None:
        """Reports that nothing is compiled there any more: the worker has ended."""
        for program in self._open:
            self._report(_COMPILED, program)
        self._open.clear()

    def _report(self, word: str, program: str) -> None:
        report_line(REPORTS_VARIABLE, f"{word} {self._name} {program}")


# Where lines go from a process that has no pipe to its engine host; `None`: it has one, or nobody
# listens. One for the process, as JAX's listeners are, which report from threads of their own.
_send: Callable[[str], None] | None = None


def report_for(send: Callable[[str], None] | None) -> None:
    """Has all reports of this process go to `send`; `None`: to the pipe again."""
    global _send
    _send = send


def report_compiling(program: str) -> None:
    """Reports that this process begins to compile `program`."""
    _report(f"{_COMPILING} {os.getpid()} {program}")


def report_compiled(program: str) -> None:
    """Reports that this process has compiled `program`, or has failed to."""
    _report(f"{_COMPILED} {os.getpid()} {program}")


def report_worker_ended(reason: str) -> None:
    """Reports that a worker of the engine has ended, which ends the engine."""
    report_line(REPORTS_VARIABLE, f"{_ENDED} {reason}")


def _report(line: str) -> None:
    if _send is not None:
        _send(line)
    else:
        report_line(REPORTS_VARIABLE, line)
