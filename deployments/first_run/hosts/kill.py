"""Ends one process of an engine on this host: a program, with the arguments TITLE and PLACE.

TITLE is the beginning of the process's title. PLACE is what the Ray folder of its cluster begins
with, or `-` in a task of Ray: then it has to be of the same Ray node as the task, so that no engine
of another cluster on the machine is hit. Prints how many there were and which was killed, as JSON.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator

import psutil

ENGINE_CORE = "VLLM::EngineCore"
# What Ray gives each process of a node, and those that they start: the number of its raylet.
_NODE = "RAY_RAYLET_PID"


def kill_one(title: str, place: str) -> dict[str, int | None]:
    """Kills the oldest process of that title with SIGKILL; `killed` is its number or `None`.

    Raises:
        KeyError: PLACE is `-`, and this is no task of Ray.
    """
    variable, value = (_NODE, os.environ[_NODE]) if place == "-" else ("RAY_TMPDIR", place)
    found = sorted(_found(title, variable, value), key=lambda process: process.create_time())
    if found:
        found[0].kill()
    return {"found": len(found), "killed": found[0].pid if found else None}


def _found(title: str, variable: str, value: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                told = process.environ().get(variable, "")
                if told.startswith(value) if variable != _NODE else told == value:
                    yield process


if __name__ == "__main__":
    sys.stdout.write(json.dumps(kill_one(sys.argv[1], sys.argv[2])) + "\n")
