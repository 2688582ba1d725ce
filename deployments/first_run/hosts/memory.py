"""Reads how much memory a process here may take: of this machine, or of the container on it."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.tpu.host.limits import memory_limit

_CGROUP = "sys/fs/cgroup"
# Of cgroup v2 and v1: what a container uses, where its parts stand, and the part that files have
# which nobody has asked for of late. The kernel takes that back before it ends a process.
_USED = (
    ("memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the processes here may take in all, and what is left of it, in bytes."""

    limit_bytes: int
    free_bytes: int


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Returns the smaller of what the machine has and what stands below `root` of the container."""
    machine = psutil.virtual_memory()
    limit = memory_limit(root)
    if limit is None:
        return HostMemory(machine.total, machine.available)
    free = max(0, limit - _used_bytes(root))
    return HostMemory(min(machine.total, limit), min(machine.available, free))


def _used_bytes(root: Path) -> int:
    """Returns what the container uses; 0 where no file tells."""
    for used, parts, name in _USED:
        try:
            used_bytes = int((root / _CGROUP / used).read_text())
            stat = dict(map(str.split, (root / _CGROUP / parts).read_text().splitlines()))
        except (OSError, ValueError):
            continue
        return used_bytes - int(stat.get(name, 0))
    return 0
