"""Judges a host's limits: what keeps libtpu or an engine from working, and what to do. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from serving.domain.topology import GIB, Generation
from serving.tpu.host.limits import HostLimits
from serving.tpu.host.locked_memory import limit_text
from serving.tpu.machines import kernel_settings

# Less than this, and libtpu cannot pin the buffers of its transfers: Google's example for it is
# 64 TiB (`ulimit -l 68719476736`), Linux's own default 8 MiB; a line of ours between them.
_LITTLE_MEMLOCK_BYTES = 1 * GIB
# An engine's image, logs and a small model; below it any download fails. A guess of ours.
_LITTLE_DISK_BYTES = 20 * GIB
_LITTLE_MEMORY_BYTES = 16 * GIB


class HostLevel(StrEnum):
    """How bad a fact is."""

    OK = "ok"
    WARN = "warn"  # it may work, slower or not for every model
    FAIL = "fail"  # the chips, or the engine, will not work


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One fact of a host, judged. `allowed` and `fix` are empty where it is in order."""

    level: HostLevel
    what: str
    found: str
    allowed: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Returns it in one line."""
        return f"{self.what}: {self.found}; allowed: {self.allowed}; {self.fix}"


def judge_host(limits: HostLimits, generation: Generation | None) -> list[HostFinding]:
    """Returns every fact with its level; `generation` of `None` is not known here."""
    return [
        HostFinding(HostLevel.OK, "user", f"{limits.user}"),
        _memlock(limits),
        *_devices(limits),
        *_kernel(limits, generation),
        _disk(limits),
        _memory(limits),
        _threads(limits),
    ]


def faults_of(limits: HostLimits, generation: Generation | None) -> tuple[str, ...]:
    """Returns what is not in order, the worst first, each in one line."""
    found = [each for each in judge_host(limits, generation) if each.level != HostLevel.OK]
    found.sort(key=lambda each: each.level != HostLevel.FAIL)
    return tuple(f"{each.level} {each}" for each in found)


def _memlock(limits: HostLimits) -> HostFinding:
    what = "locked memory"
    limit = "unlimited" if limits.memlock_bytes is None else limit_text(limits.memlock_bytes)
    if limits.may_lock_any:
        return HostFinding(HostLevel.OK, what, f"{limit}, and IPC_LOCK, by which it does not count")
    if limits.memlock_bytes is None or limits.memlock_bytes >= _LITTLE_MEMLOCK_BYTES:
        return HostFinding(HostLevel.OK, what, limit)
    return HostFinding(
        HostLevel.FAIL,
        what,
        limit,
        "unlimited, or the capability IPC_LOCK",
        "GKE: cluster.host.rights (user 0 with IPC_LOCK and SYS_RESOURCE); VM: ulimit -l unlimited",
    )


def _devices(limits: HostLimits) -> Iterator[HostFinding]:
    for node in limits.devices:
        found = f"{node.mode:04o}, owner {node.user}:{node.group}"
        if node.is_open_to_us:
            yield HostFinding(HostLevel.OK, node.path, found)
        else:
            yield HostFinding(
                HostLevel.FAIL,
                node.path,
                found,
                f"readable and writable for user {limits.user}",
                "GKE: cluster.host.rights.user 0; VM: run as root or join the group that owns it",
            )


def _kernel(limits: HostLimits, generation: Generation | None) -> Iterator[HostFinding]:
    if generation is None:
        return
    wanted = kernel_settings(generation)
    fix = "GKE: cluster.host.kernel; VM: docs/operate/tpu-vm.md"
    for what, found, least in (
        ("vm.max_map_count", limits.max_map_count, wanted.max_map_count),
        ("vfio dma_entry_limit", limits.vfio_dma_entries, wanted.vfio_dma_entries),
    ):
        if found is None or least is None or found >= least:
            words = "unknown" if found is None else f"{found}"
            yield HostFinding(HostLevel.OK, what, words)
        else:
            allowed = f"at least {least} on {generation}"
            yield HostFinding(HostLevel.WARN, what, f"{found}", allowed, fix)
    pages, best = limits.transparent_hugepages, wanted.transparent_hugepages
    if pages is None or best is None or pages == best:
        yield HostFinding(HostLevel.OK, "transparent hugepages", pages or "unknown")
    else:
        allowed = f"{best}, with which the TPU runtime starts and ends faster"
        yield HostFinding(HostLevel.WARN, "transparent hugepages", pages, allowed, fix)


def _disk(limits: HostLimits) -> HostFinding:
    what = f"disk of {limits.cache_folder}"
    if limits.cache_free_bytes is None:
        return HostFinding(HostLevel.OK, what, "unknown")
    found = f"{limits.cache_free_bytes / GIB:.0f} GiB free"
    if limits.cache_free_bytes >= _LITTLE_DISK_BYTES:
        return HostFinding(HostLevel.OK, what, found)
    return HostFinding(
        HostLevel.WARN,
        what,
        found,
        f"{_LITTLE_DISK_BYTES // GIB} GiB and the weights",
        "a larger boot disk, HF_HOME on another one, or weights in a bucket",
    )


def _memory(limits: HostLimits) -> HostFinding:
    what = "memory limit"
    if limits.memory_limit_bytes is None:
        return HostFinding(HostLevel.OK, what, "none")
    found = f"{limits.memory_limit_bytes / GIB:.0f} GiB"
    if limits.memory_limit_bytes >= _LITTLE_MEMORY_BYTES:
        return HostFinding(HostLevel.OK, what, found)
    return HostFinding(
        HostLevel.WARN,
        what,
        found,
        f"{_LITTLE_MEMORY_BYTES // GIB} GiB, and for some models all weights at once",
        "cluster.host.memory_gib_per_chip, or a load_format that streams",
    )


def _threads(limits: HostLimits) -> HostFinding:
    what = "OMP_NUM_THREADS"
    if limits.omp_threads != "1":
        return HostFinding(HostLevel.OK, what, limits.omp_threads or "not set")
    return HostFinding(
        HostLevel.WARN,
        what,
        "1",
        "more than 1: weights are converted on the host",
        "cluster.host.omp_threads; VM: set the variable before ray start",
    )
