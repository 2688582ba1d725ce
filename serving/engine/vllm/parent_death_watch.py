"""Ends an engine process when the host process that started it is gone.

A vLLM general plug-in (entry point in `pyproject.toml`), loaded early by the engine core and by
every worker: an engine core whose host was killed would otherwise keep its slice and its memory for
ever.

vLLM gives a worker on another host of the slice the environment of the first host, and with it the
name of a process that is not there. That worker is not watched: it is a Ray actor of the engine
core, which is watched, and Ray ends it when the core ends.
"""

import errno
import logging
import os
import select
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

# Set by the engine host before it starts an engine core; the workers get it too, on all hosts.
HOST_VARIABLE = "SLICEWISE_ENGINE_HOST"

_THREAD_NAME = "slicewise-host-watch"
# What Linux answers for a process that is gone; the last two where a thread has its id now.
_GONE = (errno.ESRCH, errno.EINVAL, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class HostProcess:
    """The process of an engine host, distinguished from all others, there and on other hosts.

    `boot_id` is of the kernel that it runs on. `pid_namespace` is the inode of the namespace in
    which `pid` means it. `start_ticks` (clock ticks after boot) distinguishes it from a later
    process that was given the same `pid`.
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int

    @classmethod
    def own(cls) -> Self:
        """Returns this process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return cls(boot_id, namespace, os.getpid(), _start_ticks("self"))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the process that `str` wrote as `text`.

        Raises:
            ValueError: `str` did not write it.
        """
        boot_id, namespace, pid, start_ticks = text.split("/")
        return cls(boot_id, int(namespace), int(pid), int(start_ticks))

    def __str__(self) -> str:
        return f"{self.boot_id}/{self.pid_namespace}/{self.pid}/{self.start_ticks}"

    def is_seen_by(self, other: Self) -> bool:
        """Returns whether `pid` means this process to the other one as well."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)


def watch_host() -> None:
    """Starts the watch in a process below an engine host; elsewhere does nothing. Idempotent.

    A process whose host has ended already is ended at once.
    """
    written = os.environ.get(HOST_VARIABLE)
    if written is None:
        return
    host, own = HostProcess.parse(written), HostProcess.own()
    if host == own:
        return
    if not host.is_seen_by(own):
        reason = "the engine host is in another PID namespace"
        logger.debug("host_not_watched reason=%r engine_host=%s own=%s", reason, host, own)
        return
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    pidfd = _open(host)
    if pidfd is None:
        _end_self()
        return
    threading.Thread(target=_wait, args=(pidfd,), name=_THREAD_NAME, daemon=True).start()


def _open(host: HostProcess) -> int | None:
    """Returns a file descriptor of the process; `None` when it is gone."""
    try:
        pidfd = os.pidfd_open(host.pid)
        # Read after it was opened: so it is of the opened process, or of one that came later.
        start_ticks = _start_ticks(str(host.pid))
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return pidfd if start_ticks == host.start_ticks else None


def _start_ticks(pid: str) -> int:
    """Returns when a process started, in ticks after boot; `pid` may be `self`. See proc(5)."""
    stat = Path("/proc", pid, "stat").read_text()
    # The second field is the name of the program in brackets, with anything in it.
    return int(stat.rpartition(")")[2].split()[22 - 3])


def _wait(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    _end_self()


def _end_self() -> None:
    # Not SIGTERM: vLLM's orderly shutdown waits for a frontend that no longer exists.
    os.kill(os.getpid(), signal.SIGKILL)
