"""Reads what a host is like for a process that is to use its chips. Decides nothing.

Everything is read below a root folder and from the values given, so that a recorded tree is read as
a host is. It opens no device node.
"""

import os
import re
import resource
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MAPS = "proc/sys/vm/max_map_count"
_DMA = "sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
_HUGEPAGES = "sys/kernel/mm/transparent_hugepage/enabled"
# Of cgroup v2 and v1, as a container sees its own.
_MEMORY_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_CHIP_NODE = re.compile(r"accel\d+|vfio/\d+")
# Above this a limit of cgroup v1 means none: it is the largest multiple of a page.
_NO_LIMIT = 1 << 60
_CAPABILITIES = "CapEff:"
_IPC_LOCK = 14  # its bit; source: Linux's capability.h, read 2026-11-23


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A chip's device node: owner, mode bits, and whether this user may read and write it."""

    path: str
    user: int
    group: int
    mode: int
    is_open_to_us: bool


@dataclass(frozen=True, slots=True)
class HostLimits:
    """A host as one process finds it. `None`: the file that would tell it is not there.

    `memlock_bytes` of `None` is no limit. `may_lock_any`: no limit counts for this process.
    `cache_free_bytes` is what is free where `cache_folder`, or what of it exists, lies.
    """

    user: int
    memlock_bytes: int | None
    may_lock_any: bool
    devices: tuple[DeviceNode, ...]
    max_map_count: int | None
    vfio_dma_entries: int | None
    transparent_hugepages: str | None
    cache_folder: str
    cache_free_bytes: int | None
    memory_limit_bytes: int | None
    omp_threads: str | None


def read_host_limits(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    *,
    user: int | None = None,
    memlock: int | None = None,
) -> HostLimits:
    """Returns what stands below `root`.

    `user` and `memlock` (as getrlimit gives it) of `None` are this process's.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if memlock is None else memlock
    folder = cache_folder(environment)
    return HostLimits(
        user=os.geteuid() if user is None else user,
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        may_lock_any=_may_lock_any(root),
        devices=tuple(_devices(root)),
        max_map_count=_number(root / _MAPS),
        vfio_dma_entries=_number(root / _DMA),
        transparent_hugepages=_chosen(root / _HUGEPAGES),
        cache_folder=folder,
        cache_free_bytes=_free_bytes(root / folder.removeprefix("/")),
        memory_limit_bytes=memory_limit(root),
        omp_threads=environment.get("OMP_NUM_THREADS"),
    )


def cache_folder(environment: Mapping[str, str]) -> str:
    """Returns where Hugging Face's downloads lie for a process with this environment."""
    if home := environment.get("HF_HOME"):
        return home
    base = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/root')}/.cache"
    return f"{base}/huggingface"


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that the container of this process may use; `None` without a limit."""
    for name in _MEMORY_LIMITS:
        limit = _number(root / name)
        if limit is not None:
            return limit if limit < _NO_LIMIT else None
    return None


def _may_lock_any(root: Path) -> bool:
    text = _text(root / "proc/self/status") or ""
    for line in text.splitlines():
        if line.startswith(_CAPABILITIES):
            return bool(int(line.removeprefix(_CAPABILITIES), 16) >> _IPC_LOCK & 1)
    return False


def _devices(root: Path) -> list[DeviceNode]:
    found = []
    for path in sorted([*(root / "dev").glob("accel*"), *(root / "dev/vfio").glob("*")]):
        name = path.relative_to(root / "dev").as_posix()
        if _CHIP_NODE.fullmatch(name) is None:
            continue
        try:
            status = path.stat()
        except OSError:
            continue
        is_open = os.access(path, os.R_OK | os.W_OK)
        mode = stat.S_IMODE(status.st_mode)
        found.append(DeviceNode(f"/dev/{name}", status.st_uid, status.st_gid, mode, is_open))
    return found


def _chosen(path: Path) -> str | None:
    """Returns the word in brackets, as the kernel marks the one in force."""
    found = re.search(r"\[(\w+)\]", _text(path) or "")
    return None if found is None else found[1]


def _free_bytes(folder: Path) -> int | None:
    for place in (folder, *folder.parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
