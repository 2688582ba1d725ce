"""An engine process does not outlive its host, however the host ends."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.simulation.hosts.namespaces import unshare
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE, HostProcess, watch_host
from tests.hosts.permission import skipped_where_refused

DEADLINE_S = 30.0

_ENGINE = """
import sys, threading
from serving.engine.vllm.parent_death_watch import watch_host
watch_host()
watch_host()
names = [thread.name for thread in threading.enumerate()]
print(names.count("slicewise-host-watch"), flush=True)
threading.Event().wait()
"""

# As an engine host does: says who it is, and starts an engine process.
_HOST = f"""
import os, subprocess, sys
from serving.engine.vllm.parent_death_watch import HostProcess
os.environ[{HOST_VARIABLE!r}] = str(HostProcess.own())
engine = subprocess.Popen([sys.executable, "-c", {_ENGINE!r}], stdout=subprocess.PIPE, text=True)
print(engine.pid, engine.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


@contextmanager
def running(
    program: str, below: Sequence[str] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """It runs while the block does, as what the command `below` starts."""
    process = subprocess.Popen(
        [*below, sys.executable, "-c", program],
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
    host = replace(HostProcess.own(), pid=gone.pid)
    with running(_ENGINE, **{HOST_VARIABLE: str(host)}) as engine:
        assert engine.wait(DEADLINE_S) == -signal.SIGKILL


def test_engine_process_ends_where_a_stranger_has_the_id_of_its_host() -> None:
    """This test's own process plays the stranger: it began at another time than the host did."""
    host = replace(HostProcess.own(), start_ticks=HostProcess.own().start_ticks - 1)
    with running(_ENGINE, **{HOST_VARIABLE: str(host)}) as engine:
        assert engine.wait(DEADLINE_S) == -signal.SIGKILL


def test_process_below_no_host_is_not_watched() -> None:
    with running(_ENGINE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "0"


def test_engine_process_in_a_pid_namespace_of_its_own_outlives_what_it_cannot_see() -> None:
    """As a worker on another host of the slice, which is told of the host on the first."""
    with skipped_where_refused():
        elsewhere = [*unshare("--pid", "--mount"), "--kill-child", "--mount-proc"]
    # Not as the first process there, which no signal from there can end.
    elsewhere += ["sh", "-c", '"$@"; exit $?', "sh"]
    # The id of nothing there, and of a stranger.
    for pid in (os.getpid(), 1):
        host = replace(HostProcess.own(), pid=pid)
        with running(_ENGINE, elsewhere, **{HOST_VARIABLE: str(host)}) as engine:
            assert engine.stdout is not None
            # No watch, and it lives: it would have ended before it wrote.
            assert engine.stdout.readline().strip() == "0"
            assert engine.poll() is None


_ELSEWHERE = pytest.mark.parametrize("other", [{"boot_id": "another"}, {"pid_namespace": 1}])


@_ELSEWHERE
def test_engine_process_neither_watches_nor_misses_a_host_elsewhere(other: dict[str, Any]) -> None:
    """The id is one that is used here, and one that is not."""
    with running("pass") as gone:
        gone.wait(DEADLINE_S)
    for pid in (os.getpid(), gone.pid):
        host = replace(HostProcess.own(), pid=pid, **other)
        with running(_ENGINE, **{HOST_VARIABLE: str(host)}) as engine:
            assert engine.stdout is not None
            assert engine.stdout.readline().strip() == "0"
            assert engine.poll() is None


@_ELSEWHERE
def test_reason_why_a_host_is_not_watched_is_logged_at_debug_level(
    other: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "serving.engine.vllm.parent_death_watch")
    monkeypatch.setenv(HOST_VARIABLE, str(replace(HostProcess.own(), **other)))
    watch_host()
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert "reason='the engine host is in another PID namespace'" in record.getMessage()


def test_host_process_is_written_whole() -> None:
    own = HostProcess.own()
    assert own.pid == os.getpid()
    assert own.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert f"pid:[{own.pid_namespace}]" == os.readlink("/proc/self/ns/pid")
    started_s = own.start_ticks / os.sysconf("SC_CLK_TCK") + psutil.boot_time()
    assert started_s == pytest.approx(psutil.Process().create_time(), abs=1.0)
    assert HostProcess.parse(str(own)) == own


@pytest.mark.parametrize("text", ["", "4711", "boot/1/2", "boot/1/2/3/4", "boot/namespace/2/3"])
def test_incomplete_host_process_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|invalid literal"):
        HostProcess.parse(text)
