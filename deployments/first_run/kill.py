"""Ends one process of an engine on this host: `python -m deployments.first_run.kill KIND FOLDER`.

KIND is the beginning of its title, FOLDER what the Ray folder of its cluster begins with, `-` for
any: then engines of a cluster beside it would be hit as well. Prints how many there were and which
was killed, as JSON.
"""

import contextlib
import json
import sys
from collections.abc import Iterator

import psutil

ENGINE_CORE = "VLLM::EngineCore"


def kill_one(title: str, folder: str) -> dict[str, int | None]:
    """Kills the oldest process of that title with SIGKILL; `killed` is its number or `None`."""
    found = sorted(_found(title, folder), key=lambda process: process.create_time())
    if found:
        found[0].kill()
    return {"found": len(found), "killed": found[0].pid if found else None}


def _found(title: str, folder: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if not " ".join(process.cmdline()).startswith(title):
                continue
            where = process.environ().get("RAY_TMPDIR", "")
            if folder == "-" or where.startswith(folder):
                yield process


if __name__ == "__main__":
    sys.stdout.write(json.dumps(kill_one(sys.argv[1], sys.argv[2])) + "\n")
