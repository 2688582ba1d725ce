"""An engine process does not outlive its host, however the host ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from serving.engine.host_watch import HOST_PID_VARIABLE

DEADLINE_S = 30.0

_ENGINE = """
import sys, threading
from serving.engine.host_watch import watch_host
watch_host()
watch_host()
names = [thread.name for thread in threading.enumerate()]
print(names.count("slicewise-host-watch"), flush=True)
threading.Event().wait()
"""

# As an engine host does: says who it is, and starts an engine process.
_HOST = f"""
import os, subprocess, sys
os.environ[{HOST_PID_VARIABLE!r}] = str(os.getpid())
engine = subprocess.Popen([sys.executable, "-c", {_ENGINE!r}], stdout=subprocess.PIPE, text=True)
print(engine.pid, engine.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


@contextmanager
def running(program: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engine_process_ends_with_its_host(number: signal.Signals) -> None:
    with running(_HOST) as host:
        assert host.stdout is not None
        engine_pid, num_watches = map(int, host.stdout.readline().split())
        engine = psutil.Process(engine_pid)
        try:
            assert num_watches == 1
            host.send_signal(number)
            gone, alive = psutil.wait_procs([engine], timeout=DEADLINE_S)
            assert (len(gone), alive) == (1, [])
        finally:
            if engine.is_running():
                engine.kill()


def test_engine_process_whose_host_is_gone_already_ends_at_once() -> None:
    with running("pass") as gone:
        gone.wait(DEADLINE_S)
    with running(_ENGINE, **{HOST_PID_VARIABLE: str(gone.pid)}) as engine:
        assert engine.wait(DEADLINE_S) == -signal.SIGKILL


def test_process_below_no_host_is_not_watched() -> None:
    with running(_ENGINE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "0"
