"""Tells what an application takes of this host's memory: a program, with the argument PLACE.

PLACE is as `processes_of_place` has it. Prints as JSON what the processes that run now have had at
most, each by itself and added up, pages that two of them share twice; and what they may take.
"""

import json
import re
import sys
from pathlib import Path

import psutil

from deployments.first_run.hosts.memory import read_host_memory
from deployments.first_run.hosts.node_processes import processes_of_place

# The most that was resident at once; the kernel keeps it for each process.
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def memory_here(place: str) -> dict[str, int]:
    """Returns the number of processes, their memory and its limit, in bytes.

    Raises:
        KeyError: PLACE is `-`, and this is no task of Ray.
    """
    peaks = [_peak_bytes(process) for process in processes_of_place(place)]
    return {
        "processes": len(peaks),
        "most_bytes": sum(peaks),
        "limit_bytes": read_host_memory().limit_bytes,
    }


def _peak_bytes(process: psutil.Process) -> int:
    """Returns the most that a process has had; what it has, where the kernel keeps no more."""
    try:
        found = _PEAK.search(Path(f"/proc/{process.pid}/status").read_text())
        return int(found[1]) * 1024 if found is not None else int(process.memory_info().rss)
    except (OSError, psutil.Error):
        return 0  # it has just ended


if __name__ == "__main__":
    sys.stdout.write(json.dumps(memory_here(sys.argv[1])) + "\n")
