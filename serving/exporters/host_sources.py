"""Reads a host's own sources: device plugin page, PCI bus, kubelet, workload files.

Owns the reading. Does not own what it means (`host_decode`, `chips`). Never opens a device node.
"""

import fcntl
import http.client
import os
import re
import time
from pathlib import Path

import grpc
from pydantic import ValidationError

from serving.exporters.chips import GOOGLE_VENDOR
from serving.exporters.collector import (
    AnnouncedWorkload,
    Code,
    CollectError,
    PciBus,
    PciFunction,
    PluginPage,
    PodList,
    WorkloadFiles,
)
from serving.exporters.wire import LIST_PODS

_CHUNK_BYTES = 1 << 16
# The largest pages observed have 200 kB; this bounds what something else there can make us hold.
_MAX_PAGE_BYTES = 8 << 20
# A process that computes on chips has their device nodes open. `/dev/vfio/vfio` is nobody's chip.
_DEVICE_NODE = re.compile(r"/dev/(accel\d+|vfio/\d+)")
# Of `/proc/<pid>/stat` after the command's name, which may hold anything: field 22 of the whole.
_START_TICKS_FIELD = 22 - 3


class PluginCollector:
    """The collector of the GKE device plugin's page."""

    name = "device_plugin"

    def __init__(self, target: str) -> None:
        self.target = target

    def collect(self, timeout_s: float) -> PluginPage:
        """Returns the present page.

        Raises:
            CollectError: nobody answers there, not in time, or not with a page.
        """
        deadline_s = time.monotonic() + timeout_s
        # http.client, because it ignores the proxies that the environment names.
        connection = http.client.HTTPConnection(self.target, timeout=timeout_s)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise CollectError(Code.UNREADABLE, f"status {answer.status}")
            body = bytearray()
            while chunk := answer.read1(_CHUNK_BYTES):
                body += chunk
                if len(body) > _MAX_PAGE_BYTES:
                    raise CollectError(Code.UNREADABLE, f"more than {_MAX_PAGE_BYTES} bytes")
                # The socket's timeout is for one read; a page that drips would never end.
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the page did not end")
            return PluginPage(text=body.decode())
        except TimeoutError as error:
            raise CollectError(Code.DEADLINE_EXCEEDED, f"{error}") from error
        except (http.client.HTTPException, UnicodeDecodeError) as error:
            raise CollectError(Code.UNREADABLE, f"{error!r}") from error
        except OSError as error:
            raise CollectError(Code.UNAVAILABLE, f"{error}") from error
        finally:
            connection.close()


class PciCollector:
    """The collector of Google's functions on the PCI bus."""

    name = "pci"
    target = ""

    def __init__(self, sys_root: Path = Path("/sys")) -> None:
        self._devices = sys_root / "bus/pci/devices"

    def collect(self, timeout_s: float) -> PciBus | None:  # noqa: ARG002 - sysfs has no timeout
        """Returns the functions on the bus; `None` on a machine without a PCI bus.

        Raises:
            CollectError: the bus cannot be read.
        """
        try:
            paths = sorted(self._devices.iterdir())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CollectError(Code.UNAVAILABLE, f"{error}") from error
        return PciBus(functions=tuple(filter(None, map(_google_function, paths))))


def _google_function(path: Path) -> PciFunction | None:
    """Returns the function; `None` for another vendor's, or one just taken away."""
    try:
        if (path / "vendor").read_text().strip() != GOOGLE_VENDOR:
            return None
        device = (path / "device").read_text().strip()
    except OSError:
        return None
    group = path / "iommu_group"
    return PciFunction(
        address=path.name,
        device=device,
        iommu_group=group.resolve().name if group.exists() else None,
    )


class PodCollector:
    """The collector of the kubelet's pod-resources service."""

    name = "pod_resources"

    def __init__(self, socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")) -> None:
        self.target = f"{socket}"
        self._socket = socket

    def collect(self, timeout_s: float) -> PodList | None:
        """Returns the pods with their devices; `None` where there is no socket of a kubelet.

        Raises:
            CollectError: it is there and does not answer.
        """
        if not self._socket.exists():
            return None
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            try:
                return PodList(answer=channel.unary_unary(LIST_PODS)(b"", timeout=timeout_s))
            except grpc.RpcError as error:
                # grpc raises a call, which its types do not show.
                code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
                raise CollectError(code.name, f"{error}") from error


class WorkloadCollector:
    """The collector of the files in which processes of ours declare their work."""

    name = "workloads"

    def __init__(self, run_dir: Path, proc: Path = Path("/proc")) -> None:
        self.target = f"{run_dir}"
        self._folder = run_dir / "workloads"
        self._proc = proc

    def collect(self, timeout_s: float) -> WorkloadFiles | None:  # noqa: ARG002 - files are local
        """Returns the files of live processes that hold a chip; `None` without the folder.

        Raises:
            CollectError: the folder cannot be read.
        """
        try:
            paths = sorted(self._folder.glob("*.json"))
            if not paths and not self._folder.exists():
                return None
        except OSError as error:
            raise CollectError(Code.UNAVAILABLE, f"{error}") from error
        workloads, unreadable = [], 0
        for path in paths:
            try:
                workload = AnnouncedWorkload.model_validate_json(path.read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, ValidationError):
                unreadable += 1
                continue
            if self._is_at_work(path, workload):
                workloads.append(workload)
        return WorkloadFiles(workloads=tuple(workloads), unreadable=unreadable)

    def _is_at_work(self, path: Path, workload: AnnouncedWorkload) -> bool:
        if workload.holds_host and _is_locked(path):
            return True
        process = self._proc / f"{workload.pid}"
        if start_ticks(process) != workload.started_ticks:
            return False
        if workload.holds_host:
            return True
        try:
            return any(_DEVICE_NODE.fullmatch(_link(fd)) for fd in (process / "fd").iterdir())
        except PermissionError:
            # Another user's process: we cannot see what it has open, only that it lives.
            return True
        except OSError:
            return False


def _is_locked(path: Path) -> bool:
    """Returns whether its writer lives, which holds a lock on it as long as it does.

    Unlike a process id, a lock is seen from the other containers of a pod.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def start_ticks(process: Path) -> int | None:
    """Returns the start of the process in a `/proc` folder, in clock ticks; `None` if gone."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return int(fields[_START_TICKS_FIELD])
    except (OSError, IndexError, ValueError):
        return None


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""  # it was closed meanwhile


def announce_workload(
    run_dir: Path,
    model: str,
    deployment: str,
    replica: str,
    chips: tuple[int, ...] | None = None,
) -> Path:
    """Declares whose work this process does; the file is there whole or not at all.

    `chips` are those of the host by index, `None` for all. The process need not remove the file: it
    counts as long as the process lives and holds a chip.
    """
    path, lock = _announce(run_dir, model, deployment, replica, chips, holds_host=False)
    os.close(lock)
    return path


def announce_host(run_dir: Path, model: str, deployment: str, replica: str) -> int:
    """Declares whose work all chips of this host do, whichever process has them open.

    It counts as long as the returned file descriptor is open, which it is until this process ends
    or closes it; also for who sees no process of ours.
    """
    return _announce(run_dir, model, deployment, replica, None, holds_host=True)[1]


def _announce(
    run_dir: Path,
    model: str,
    deployment: str,
    replica: str,
    chips: tuple[int, ...] | None,
    *,
    holds_host: bool,
) -> tuple[Path, int]:
    pid = os.getpid()
    ticks = start_ticks(Path("/proc") / f"{pid}")
    workload = AnnouncedWorkload(
        pid=pid,
        started_ticks=ticks or 0,
        model=model,
        deployment=deployment,
        replica=replica,
        chips=chips,
        holds_host=holds_host,
    )
    folder = run_dir / "workloads"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{pid}.json"
    draft = path.with_suffix(".new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    # Before it can be seen, so that it is never seen unlocked.
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, workload.model_dump_json().encode())
    return draft.replace(path), file
