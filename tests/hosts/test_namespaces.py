"""Hosts in namespaces are apart as hosts are, joined by a network, and leave nothing behind."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from deployments.simulation.hosts.namespaces import Host, Hosts, check_permitted

from .http_calls import Call, HttpCalls
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
from deployments.simulation.hosts.namespaces import Hosts
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


def test_networks_of_this_machine_have_addresses_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with skipped_where_refused(), contextlib.ExitStack() as end:
        networks = [end.enter_context(Hosts(folder, joins_machine=True)) for folder in folders]
        hosts = [network.add("host") for network in networks]
        for network, host in zip(networks, hosts, strict=True):
            answer_calls(host)
            # From this machine, and to it.
            assert httpx.get(f"http://{host.address}:{PORT}", timeout=DEADLINE_S).is_success
            with socket.create_server((network.machine_address, 0)) as here:
                assert reach_port(host, network.machine_address, here.getsockname()[1])
                assert not reach_port(hosts[networks[0] is network], network.machine_address, PORT)
        assert len({host.address for host in hosts}) == len(hosts)
        assert all(is_ours(network.machine_address) for network in networks)
    assert not any(is_ours(network.machine_address) for network in networks)


# Joins a network, and says by which interface this machine is on it.
_MEMBER = """
import pathlib, sys
from deployments.simulation.hosts.namespaces import Hosts
with Hosts(pathlib.Path(sys.argv[1]), joins_machine=True) as network:
    print(network.machine_address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("network")
def test_interface_of_a_process_that_is_killed_goes(tmp_path: Path) -> None:
    member = subprocess.Popen(
        [sys.executable, "-c", _MEMBER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert member.stdout is not None
    address = member.stdout.readline().strip()
    assert is_ours(address)
    member.kill()
    member.communicate(timeout=DEADLINE_S)
    until_s = time.monotonic() + DEADLINE_S
    while is_ours(address):
        assert time.monotonic() < until_s, f"the interface with {address} is still there"
        time.sleep(0.05)


def is_ours(address: str) -> bool:
    found = psutil.net_if_addrs().values()
    return any(each.address == address for interface in found for each in interface)


def reach_port(host: Host, address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(('{address}', {port}), 1).close()"
    command = host.command(sys.executable, "-c", program)
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_what_a_host_writes_is_kept_apart_from_others(tmp_path: Path) -> None:
    with skipped_where_refused(), Hosts(tmp_path) as network:
        first, second = network.add("first"), network.add("second")
        first.run("touch", f"{tmp_path}/mine")
        assert second.run("ls", str(tmp_path)) == ""
        first.end()
    assert [path.name for path in tmp_path.glob("hosts/*/mine")] == ["mine"]


def test_addresses_are_given_again_but_not_while_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.simulation.hosts.namespaces._MAX_HOSTS", 2)
    with skipped_where_refused(), Hosts() as network:
        first, second = network.add("first"), network.add("second")
        with pytest.raises(ValueError, match="there are 2 hosts; allowed: 2"):
            network.add("third")
        first.end()
        third = network.add("third")
        assert third.address == first.address
        # Once more, as an owner may: the address is another host's now.
        first.end()
        second.end()
        assert network.add("fourth").address == second.address
