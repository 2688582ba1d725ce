"""Ends an engine process when the host process that started it is gone.

A vLLM general plug-in (entry point in `pyproject.toml`), loaded early by the engine core and by
every worker: an engine core whose host was killed would otherwise keep its slice and its memory for
ever.
"""

import os
import select
import signal
import threading

# Set by the engine host before it starts an engine core; inherited by the workers.
HOST_PID_VARIABLE = "SLICEWISE_ENGINE_HOST_PID"


def watch_host() -> None:
    """Starts the watch in a process below an engine host; nothing anywhere else. Idempotent."""
    host_pid = os.environ.get(HOST_PID_VARIABLE)
    if host_pid is None or int(host_pid) == os.getpid():
        return
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    try:
        pidfd = os.pidfd_open(int(host_pid))
    except ProcessLookupError:
        _end_self()
        return
    threading.Thread(target=_wait, args=(pidfd,), name=_THREAD_NAME, daemon=True).start()


_THREAD_NAME = "slicewise-host-watch"


def _wait(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    _end_self()


def _end_self() -> None:
    # Not SIGTERM: vLLM's orderly shutdown waits for a frontend that no longer exists.
    os.kill(os.getpid(), signal.SIGKILL)
