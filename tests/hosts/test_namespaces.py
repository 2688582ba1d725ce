"""Hosts in namespaces are apart as hosts are, joined by a network, and leave nothing behind."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .http_calls import Call, HttpCalls
from .namespaces import Host, Hosts, check_permitted
from .permission import skipped_where_refused

pytestmark = pytest.mark.process

DEADLINE_S = 20.0
PORT = 7000


@pytest.fixture
def network() -> Iterator[Hosts]:
    with skipped_where_refused():
        check_permitted()
    with Hosts() as network:
        yield network


@pytest.fixture
def hosts(network: Hosts) -> list[Host]:
    return [network.add(f"host-{number}") for number in range(3)]


def answer_calls(host: Host) -> None:
    program = (sys.executable, "-u", "-m", "http.server", str(PORT), "--directory", "/dev/shm")
    server = host.start(*program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("Serving HTTP")


def reach(caller: HttpCalls, *callees: Host, timeout_s: float = DEADLINE_S) -> list[bool]:
    calls = [Call(f"http://{host.address}:{PORT}", timeout_s=timeout_s) for host in callees]
    return [reply.status == 200 for reply in caller.make(calls)]


def misses(caller: HttpCalls, callee: Host) -> bool:
    return reach(caller, callee, timeout_s=1.0) == [False]


def test_hosts_have_processes_names_and_folders_of_their_own(
    network: Hosts, hosts: list[Host]
) -> None:
    namespaces = {host.run("readlink", "/proc/self/ns/pid") for host in hosts}
    assert len(namespaces | {os.readlink("/proc/self/ns/pid") + "\n"}) == len(hosts) + 1
    assert [host.run("hostname").strip() for host in hosts] == ["host-0", "host-1", "host-2"]
    for folder in (network.folder, Path("/dev/shm")):
        hosts[0].run("touch", str(folder / "mine"))
        assert hosts[0].path(folder / "mine").exists()
        assert not hosts[1].path(folder / "mine").exists()
        assert not (folder / "mine").exists()


def test_hosts_reach_each_other_until_one_is_cut_off(hosts: list[Host]) -> None:
    for host in hosts:
        answer_calls(host)
    assert len({host.address for host in hosts}) == len(hosts)
    first, second = HttpCalls(hosts[0]), HttpCalls(hosts[1])
    assert reach(first, *hosts) == [True, True, True]
    hosts[1].cut()
    assert misses(first, hosts[1])
    assert misses(second, hosts[0])
    assert reach(first, hosts[0], hosts[2]) + reach(second, hosts[1]) == [True, True, True]
    hosts[1].join()
    assert reach(first, *hosts) + reach(second, *hosts) == [True] * 6


def test_end_of_a_host_ends_its_processes_and_no_others(hosts: list[Host]) -> None:
    for host in hosts:
        answer_calls(host)
    gone, others = hosts[0].processes(), hosts[1].processes()
    # The server, and what keeps the host.
    assert (len(gone), len(others)) == (2, 2)
    hosts[0].end()
    assert not any(process.is_running() for process in gone)
    assert hosts[0].processes() == []
    assert all(process.is_running() for process in others)
    caller = HttpCalls(hosts[1])
    assert misses(caller, hosts[0])
    assert reach(caller, hosts[1], hosts[2]) == [True, True]


def test_orphans_of_a_host_are_reaped(hosts: list[Host]) -> None:
    orphan = hosts[0].run("sh", "-c", "sleep 0.01 > /dev/null & echo $!").strip()
    hosts[0].run("sh", "-c", f"timeout {DEADLINE_S} tail --pid={orphan} -f /dev/null")
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in hosts[0].processes())


# Makes a host with a process on it, and says which.
_OWNER = """
import subprocess, sys
from tests.hosts.namespaces import Hosts
with Hosts() as network:
    host = network.add("host-0")
    host.start("sleep", "1000")
    while len(host.processes()) < 2:
        pass
    print(network.folder, *(process.pid for process in host.processes()), flush=True)
    if sys.argv[1] == "stay":
        sys.stdin.read()
"""


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("end", ["leave", "stay"])
def test_no_process_of_a_host_outlives_the_owner(end: str) -> None:
    """It leaves them, or is killed."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    folder, *pids = owner.stdout.readline().split()
    assert len(pids) == 2
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))
    if end == "stay":
        owner.kill()
    owner.communicate(timeout=DEADLINE_S)
    assert psutil.wait_procs(processes, timeout=DEADLINE_S)[1] == []
    # Of an owner that was killed an empty folder stays, and nothing else.
    if end == "stay":
        Path(folder).rmdir()
    assert not Path(folder).exists()
