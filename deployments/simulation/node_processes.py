"""The processes of simulated hosts: all of them, or those of the engine alone.

Reads the process table anew at each question. Owns no process.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psutil

# How Ray titles the process of `serving.engine.host_actor`; vLLM's processes are below it.
_ENGINE_TITLE = "ray::EngineHostActor"


def processes_below(roots: Iterable[int]) -> list[psutil.Process]:
    """The processes of these ids that exist, and every one below them."""
    wanted = frozenset(roots)
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid in wanted:
                found.append(process)
            else:
                children[process.ppid()].append(process)
    # It grows while it is walked, until all children have been found.
    for process in found:
        found += children[process.pid]
    return found


def engines_below(roots: Iterable[int]) -> list[psutil.Process]:
    """The engine hosts among the processes below `roots`, and every process below those."""
    below = processes_below(roots)
    return processes_below(
        process.pid for process in below if _title(process).startswith(_ENGINE_TITLE)
    )


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


# Any: a `ray._private.node.Node`.
def node_pids(node: Any) -> set[int]:
    """The processes of a Ray node that are children of ours."""
    return {info.process.pid for kind in list(node.all_processes.values()) for info in list(kind)}


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Sends SIGKILL to those that still live."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
