"""Ends one process of an engine on this host: a program, with the arguments TITLE and PLACE.

TITLE is the beginning of the process's title, PLACE is as `processes_of_place` has it. Prints how
many there were and which was killed, as JSON.
"""

import json
import sys

from deployments.first_run.hosts.node_processes import processes_of_place

ENGINE_CORE = "VLLM::EngineCore"


def kill_one(title: str, place: str) -> dict[str, int | None]:
    """Kills the oldest process of that title with SIGKILL; `killed` is its number or `None`.

    Raises:
        KeyError: PLACE is `-`, and this is no task of Ray.
    """
    found = sorted(
        processes_of_place(place, title), key=lambda process: float(process.create_time())
    )
    if found:
        found[0].kill()
    return {"found": len(found), "killed": found[0].pid if found else None}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(kill_one(sys.argv[1], sys.argv[2])) + "\n")
