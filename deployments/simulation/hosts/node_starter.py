"""Starts Ray nodes on hosts in namespaces: a program that forks, and reads orders from its input.

`ray start` takes two seconds of a core, nearly all of it to import Ray. Here that is done once:
each order is carried out by a fork, which enters the host, starts the node's processes there and
ends. An order is a line of JSON, and so is its outcome on the output. One thread, so it may fork.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
# What is entered, the files last: the others are found in this machine's /proc.
_NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")
_FAILED = 1


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """What to start: a node with these `parameters` of Ray's `RayParams`.

    `first_pid` is the host's first process, as seen from here. `log` is on the host.
    """

    node_id: str
    first_pid: int
    log: str
    parameters: dict[str, Any]

    def encode(self) -> str:
        """Returns the order as the program reads it."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What came of an order: `problem` is `None` where the node has started."""

    node_id: str
    problem: str | None


def decode_outcome(line: str) -> NodeOutcome:
    """Returns what the program wrote."""
    return NodeOutcome(**json.loads(line))


def main() -> None:
    """Carries out orders until there are no more."""
    # Imported here, and by every fork with it.
    import ray._private.node  # noqa: PLC0415

    # Nobody asks how a fork ended: it says so itself.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            _carry_out(NodeOrder(**json.loads(line)), ray._private.node.Node)


def _carry_out(order: NodeOrder, node: Any) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    problem = None
    try:
        _enter(order.first_pid)
        # Who enters a namespace of processes is not in it himself: his children are.
        inside = os.fork()
        if inside == 0:
            _start(order, node)
        _, status = os.waitpid(inside, 0)
        if status:
            problem = Path(order.log).read_text(encoding="utf-8", errors="replace")
    except BaseException:  # noqa: BLE001 # said where it is read
        problem = traceback.format_exc()
    with contextlib.suppress(BrokenPipeError):
        # At once, so that no two outcomes mix.
        os.write(1, (json.dumps(asdict(NodeOutcome(order.node_id, problem))) + "\n").encode())
    os._exit(0)


def _enter(pid: int) -> None:
    place = Path.cwd()
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for file in files:
        if _libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"the namespaces of process {pid}")
        os.close(file)
    os.chdir(place)


def _start(order: NodeOrder, node: Any) -> None:
    from ray._private.parameter import RayParams  # noqa: PLC0415

    log = os.open(order.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        os.setsid()
        node(RayParams(**order.parameters), head=False, shutdown_at_exit=False, spawn_reaper=False)
    except BaseException:  # noqa: BLE001 # the log is read by who ordered it
        traceback.print_exc()
        os._exit(_FAILED)
    # The node's processes go on, below the host's first one.
    os._exit(0)


if __name__ == "__main__":
    main()
