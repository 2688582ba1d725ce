"""The hosts of a simulated cluster are apart: own processes, own addresses, a network to cut.

And what crosses that network between a slice's hosts and its replica, with the agents that Ray
starts there.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._raylet import GcsClient

from deployments.simulation.control import call
from deployments.simulation.hosts.namespaces import check_permitted
from deployments.start.serve import child_environment, dashboard_port
from serving.link.tls import Authority, ClientTls, TlsRole
from serving.slices.host_heartbeat.watcher import HostWatcher
from tests.e2e.application import PROJECT_ROOT
from tests.hosts.permission import skipped_where_refused
from tests.slices.sinks import RecordingSink

# Ray's head and four hosts.
pytestmark = [pytest.mark.process, pytest.mark.slow]

# Ray takes some two minutes to believe that a host without a network is dead (below), and another
# has its name meanwhile.
SOON_S = 300.0
PARTITION_S = 4.0
ALIVE = 0
NAMES = ["spot-0-0", "spot-0-1", "spot-1-0", "spot-1-1"]
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
CLUSTER = """
import signal, sys, threading
from pathlib import Path
from deployments.simulation.cluster import SimulatedCluster
from deployments.simulation.control import ControlServer
from deployments.simulation.hosts.namespaces import Hosts
from deployments.simulation.plan import parse_plan

is_over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: is_over.set())
folder = Path(sys.argv[1])
plan = parse_plan(SLICES)
with Hosts(folder, joins_machine=True) as network:
    with SimulatedCluster(plan, int(sys.argv[2]), network=network) as cluster:
        with ControlServer(cluster, folder / "c" / "s"):
            print("up", flush=True)
            is_over.wait()
"""
SLICES = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 2, "returns_after_s": 0, **V6E_2X4}
    ]
}
# Holds a slice as a replica does, with the secret that is its first line of input. It prints where
# the agents are, and at last why the slice has to be left.
REPLICA = """
import asyncio, json, sys
import ray
from serving.config.slice_spec import SliceSpec
from serving.directory.ray_hosts import observe_cluster
from serving.domain.inventory import Slice
from serving.slices.reservation import reserve
from serving.slices.watch import AGENT_CPUS, SliceWatch

async def main(name, secret):
    found = [host for host in await observe_cluster() if host.slice_name == name]
    hosts = sorted(found, key=lambda host: host.worker_id)
    shape = hosts[0].shape
    reservation = await reserve((Slice(name, tuple(hosts)),), shape, AGENT_CPUS, timeout_s=60.0)
    is_ordered = asyncio.Event()
    spec = SliceSpec("spot", shape)
    watch = SliceWatch(reservation, 0, spec, secret, lambda _: is_ordered.set())
    try:
        await watch.start()
        addresses = [watch.reports[host.worker_id].address for host in hosts]
        print("agents:" + json.dumps(addresses), flush=True)
        await is_ordered.wait()
        print("order:" + watch.order.reason, flush=True)
    finally:
        await watch.stop()
        await reservation.release()

secret = sys.stdin.buffer.readline().strip()
ray.init(address=sys.argv[1], namespace="replica", log_to_driver=False)
asyncio.run(main(sys.argv[2], secret))
"""
SECRET = b"a cluster secret that these tests share"
OTHER_SECRET = b"another cluster secret of these tests"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Ray's sockets lie below it: their paths are short.
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))}
    # Raylets that are silent for as long as a partition lasts are not dead yet.
    patience = {"RAY_health_check_failure_threshold": "10", "PYTHONPATH": str(PROJECT_ROOT)}
    # The tests ask Ray from this process, which has no token of the cluster.
    open_to_us = {"RAY_AUTH_MODE": "disabled"}
    environment = child_environment(inherited | patience | open_to_us, str(folder))
    del environment["RAY_ADDRESS"]
    return environment


@pytest.fixture(scope="module")
def running(folder: Path, environment: dict[str, str]) -> Iterator[psutil.Process]:
    with skipped_where_refused():
        check_permitted()
    program = CLUSTER.replace("SLICES", repr(SLICES))
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(dashboard_port(environment))],
        env=environment,
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SOON_S)


@pytest.fixture
def control(folder: Path, running: psutil.Process) -> Path:
    """The control socket of a cluster with all four hosts."""
    path = folder / "c" / "s"
    until(lambda: sorted(name for name, _ in live_hosts(path)) == NAMES)
    return path


def hosts(control: Path) -> dict[str, Mapping[str, Any]]:
    """What Ray knows of each live host of a slice, by its name.

    Raises:
        AssertionError: Ray believes two hosts of one name to be alive.
    """
    found = live_hosts(control)
    by_name = dict(found)
    assert len(by_name) == len(found), found
    return by_name


def live_hosts(control: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The same, with those which Ray does not know yet to be dead: names may be there twice."""
    client = GcsClient(address=call(control, "describe")["ray_address"])
    return [
        (
            f"{info.labels['ray.io/tpu-slice-name']}-{info.labels['ray.io/tpu-worker-id']}",
            {
                "node_id": node_id.hex(),
                "address": info.node_manager_address,
                "port": info.node_manager_port,
            },
        )
        for node_id, info in client.get_all_node_info().items()
        if info.state == ALIVE and "ray.io/tpu-slice-name" in info.labels
    ]


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s, "not so in time"
        time.sleep(0.1)


def raylets(running: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in running.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "raylet":
                found.append(process)
    return found


def answers(host: Mapping[str, Any]) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host["address"], host["port"]), 0.5).close()
        return True
    return False


def test_every_host_has_processes_and_an_address_of_its_own(
    control: Path, running: psutil.Process
) -> None:
    found = hosts(control)
    assert sorted(found) == NAMES
    assert len({host["address"] for host in found.values()}) == 4
    until(lambda: all(answers(host) for host in found.values()))
    # Four hosts', and the head's, which is this machine's.
    for kind in ("pid", "net", "mnt", "uts", "ipc"):
        spaces = {os.readlink(f"/proc/{raylet.pid}/ns/{kind}") for raylet in raylets(running)}
        assert len(spaces) == 5, kind


def test_slice_is_cut_off_by_its_network_and_comes_back_as_it_was(
    control: Path, running: psutil.Process
) -> None:
    before = hosts(control)
    cut = [host for name, host in before.items() if name.startswith("spot-0")]
    others = [host for name, host in before.items() if name.startswith("spot-1")]
    call(control, "partition", name="spot-0", for_s=PARTITION_S)
    assert described(control, "spot-0")["partitioned_for_s"] <= PARTITION_S
    assert described(control, "spot-1")["partitioned_for_s"] is None
    assert not any(answers(host) for host in cut)
    until(lambda: all(answers(host) for host in others))
    # By no signal: nothing stands still.
    states = {each.status() for each in running.children(recursive=True)}
    assert psutil.STATUS_STOPPED not in states
    until(lambda: all(answers(host) for host in cut))
    assert hosts(control) == before


def test_later_order_takes_the_place_of_the_earlier_one(control: Path) -> None:
    host = hosts(control)["spot-0-0"]
    call(control, "partition", name="spot-0", for_s=600.0)
    assert not answers(host)
    call(control, "slow", name="spot-0", factor=2.0, for_s=600.0)
    until(lambda: answers(host))
    call(control, "partition", name="spot-0", for_s=0.1)
    held = ("slow_factor", "slowed_for_s", "partitioned_for_s")
    until(lambda: [described(control, "spot-0")[name] for name in held] == [None, None, None])
    until(lambda: answers(host))


def described(control: Path, name: str) -> dict[str, Any]:
    (found,) = [each for each in call(control, "describe")["slices"] if each["name"] == name]
    return dict(found)


@pytest.fixture
def replica(control: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process beside the head that holds spot-0."""
    address = call(control, "describe")["ray_address"]
    with subprocess.Popen(
        [sys.executable, "-c", REPLICA, address, "spot-0"],
        env=environment,
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(SECRET + b"\n")
            process.stdin.flush()
            yield process
        finally:
            process.terminate()


def test_streams_of_agents_cross_the_network_in_tls_and_strangers_have_no_part_in_them(
    control: Path, replica: subprocess.Popen[bytes], running: psutil.Process, folder: Path
) -> None:
    agents = [tuple(address) for address in json.loads(told_by(replica, "agents:"))]
    assert [host for host, _ in agents] == [
        host["address"] for name, host in sorted(hosts(control).items()) if "spot-0" in name
    ]
    assert not any(ipaddress.ip_address(host).is_loopback for host, _ in agents)
    for address in agents:
        version, heard = said_by(address, opening(TlsRole.HOST_WATCHER))
        assert version == "TLSv1.3"
        assert heard.startswith(b'{"notices":')
        strangers = [None, opening(TlsRole.GATEWAY), opening(TlsRole.HOST_WATCHER, OTHER_SECRET)]
        assert [said_by(address, stranger)[1] for stranger in strangers] == [b""] * 3
    # Nor is an agent believed by a replica of another cluster.
    reason = asyncio.run(loss_seen_with(OTHER_SECRET, agents[0]))
    assert "its agent cannot prove itself" in reason
    # The replica itself has its stream, and what strangers said has changed nothing.
    assert replica.poll() is None
    # Neither a command line nor a log has the secret.
    commands = command_lines(running)
    assert any("HostAgent" in command for command in commands)
    assert not any(SECRET.decode() in command for command in commands)
    logs = [path.read_bytes() for path in folder.rglob("logs/*") if path.is_file()]
    assert any(b"HostAgent" in log for log in logs)
    assert not any(SECRET in log for log in logs)
    before = hosts(control)
    call(control, "preempt", name="spot-0", notice_s=1.0, worker_id=1)
    assert told_by(replica, "order:").startswith("host 1: the host is preempted")
    assert replica.wait(SOON_S) == 0
    until(lambda: is_replaced(control, before, "spot-0"))


def command_lines(running: psutil.Process) -> list[str]:
    found = []
    for process in running.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def told_by(replica: subprocess.Popen[bytes], word: str) -> str:
    """What the replica says next after that word, between lines of Ray's own."""
    assert replica.stdout is not None
    for line in replica.stdout:
        if line.startswith(word.encode()):
            return line.decode().removeprefix(word).strip()
    raise AssertionError(f"it ended without {word}")


def opening(role: TlsRole, secret: bytes = SECRET) -> ssl.SSLContext:
    """The context of a peer that shows such a certificate and takes any."""
    context = Authority(secret).issue(role, time.time()).context
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def said_by(address: tuple[str, int], context: ssl.SSLContext | None) -> tuple[str | None, bytes]:
    """The version of TLS, and the first that an agent says to a peer."""
    version, heard = None, b""
    with contextlib.suppress(ssl.SSLError, ConnectionError), contextlib.ExitStack() as open_ones:
        peer = open_ones.enter_context(socket.create_connection(address, SOON_S))
        if context is not None:
            peer = open_ones.enter_context(context.wrap_socket(peer))
            version = peer.version()
        else:
            peer.sendall(b"left\n")
        heard = peer.recv(64 * 1024)
    return version, heard


async def loss_seen_with(secret: bytes, address: tuple[str, int]) -> str:
    sink = RecordingSink()
    tls = ClientTls(secret, role=TlsRole.HOST_WATCHER)
    await asyncio.wait_for(HostWatcher(0, address, sink, tls).run(), SOON_S)
    (lost,) = sink.announced
    return lost.reason


def test_host_that_is_killed_takes_its_processes_and_its_slice_returns_elsewhere(
    control: Path, running: psutil.Process
) -> None:
    before = hosts(control)
    doomed = {
        each.pid: [each, *each.children(recursive=True)]
        for each in raylets(running)
        if f"--node_id={before['spot-1-1']['node_id']}" in each.cmdline()
    }
    (gone,) = doomed.values()
    call(control, "kill", name="spot-1", worker_id=1)
    assert not any(process.is_running() for process in gone)
    until(lambda: is_replaced(control, before, "spot-1"))
    check_others_stayed(before, hosts(control))


@pytest.mark.long
def test_slice_whose_host_ended_by_itself_is_replaced(
    control: Path, running: psutil.Process
) -> None:
    before = hosts(control)
    (raylet,) = [
        each
        for each in raylets(running)
        if f"--node_id={before['spot-1-0']['node_id']}" in each.cmdline()
    ]
    # No order to the simulation: it has to see for itself.
    raylet.kill()
    until(lambda: is_replaced(control, before, "spot-1"))
    check_others_stayed(before, hosts(control))


def check_others_stayed(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> None:
    assert {name: after[name] for name in after if name.startswith("spot-0")} == {
        name: before[name] for name in before if name.startswith("spot-0")
    }


def is_replaced(control: Path, before: Mapping[str, Mapping[str, Any]], slice_name: str) -> bool:
    """Whether every host of the slice is another one, and the earlier are known to be dead."""
    found = live_hosts(control)
    return sorted(name for name, _ in found) == NAMES and all(
        host["node_id"] != before[name]["node_id"]
        for name, host in found
        if name.startswith(slice_name)
    )


def test_what_hosts_write_stays_where_an_operator_finds_it(control: Path, folder: Path) -> None:
    logs = {
        path.parts[-5].rpartition("-")[0] for path in folder.glob("hosts/*/ray/*/logs/raylet.out")
    }
    assert logs >= hosts(control).keys()
