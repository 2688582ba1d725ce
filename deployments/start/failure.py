"""Finds why an application could not be started, in the log of Serve's controller.

Serve itself tries again, for minutes; the reason stands in the log after the first attempt. Pure.
"""

import re
from collections.abc import Iterable

# One or the other begins a record; the traceback is below it, up to the next record.
_FAILURE = re.compile(
    r"-- (?:Exception in Replica\(.*deployment='(?P<deployment>[^']+)'"
    r"|Deploying app '(?P<application>[^']+)' failed)"
)
_RECORD = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d{4}-\d\d-\d\d ")
_EXCEPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)): ?")
_NOISE = ("For further information visit",)


def start_failure(log_lines: Iterable[str]) -> str | None:
    """Returns what failed first and its reason; `None` while nothing has.

    A failure whose record may still be growing is reported once the next record has begun.
    """
    what: str | None = None
    below: list[str] = []
    for line in log_lines:
        if what is not None:
            if _RECORD.match(line):
                return f"{what}: {_reason(below)}"
            below.append(line)
        elif found := _FAILURE.search(line):
            deployment = found["deployment"]
            what = f"deployment {deployment}" if deployment else "the application"
    return None


def _reason(traceback: list[str]) -> str:
    """The last exception of a traceback, with all the lines of its message."""
    starts = [at for at, line in enumerate(traceback) if _EXCEPTION.match(line)]
    if not starts:
        return "\n".join(traceback).strip() or "no reason was logged"
    lines = [line.rstrip() for line in traceback[starts[-1] :]]
    kept = [line for line in lines if line and not line.strip().startswith(_NOISE)]
    return "\n".join([_EXCEPTION.sub("", kept[0], count=1), *kept[1:]])
