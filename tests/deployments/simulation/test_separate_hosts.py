"""The hosts of a simulated cluster are apart: own processes, own addresses, a network to cut."""

import contextlib
import os
import signal
import socket
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
from tests.e2e.application import PROJECT_ROOT
from tests.hosts.permission import skipped_where_refused

# Ray's head and four hosts.
pytestmark = [pytest.mark.process, pytest.mark.slow]

SOON_S = 120.0
PARTITION_S = 4.0
ALIVE = 0
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


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Ray's sockets lie below it: their paths are short.
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[psutil.Process]:
    with skipped_where_refused():
        check_permitted()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))}
    # Raylets that are silent for as long as a partition lasts are not dead yet.
    patience = {"RAY_health_check_failure_threshold": "10", "PYTHONPATH": str(PROJECT_ROOT)}
    # The tests ask Ray from this process, which has no token of the cluster.
    open_to_us = {"RAY_AUTH_MODE": "disabled"}
    environment = child_environment(inherited | patience | open_to_us, str(folder))
    del environment["RAY_ADDRESS"]
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
    until(lambda: len(hosts(path)) == 4)
    return path


def hosts(control: Path) -> dict[str, Mapping[str, Any]]:
    """What Ray knows of each live host of a slice, by its name."""
    client = GcsClient(address=call(control, "describe")["ray_address"])
    return {
        f"{info.labels['ray.io/tpu-slice-name']}-{info.labels['ray.io/tpu-worker-id']}": {
            "node_id": node_id.hex(),
            "address": info.node_manager_address,
            "port": info.node_manager_port,
        }
        for node_id, info in client.get_all_node_info().items()
        if info.state == ALIVE and "ray.io/tpu-slice-name" in info.labels
    }


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
    assert found.keys() == {"spot-0-0", "spot-0-1", "spot-1-0", "spot-1-1"}
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
    until(lambda: hosts(control).keys() == before.keys() and is_new(control, before, "spot-1"))
    check_others_stayed(before, hosts(control))


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
    until(lambda: hosts(control).keys() == before.keys() and is_new(control, before, "spot-1"))
    check_others_stayed(before, hosts(control))


def check_others_stayed(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> None:
    assert {name: after[name] for name in after if name.startswith("spot-0")} == {
        name: before[name] for name in before if name.startswith("spot-0")
    }


def is_new(control: Path, before: Mapping[str, Mapping[str, Any]], slice_name: str) -> bool:
    """Whether every host of the slice is another one than it was."""
    return all(
        host["node_id"] != before[name]["node_id"]
        for name, host in hosts(control).items()
        if name.startswith(slice_name)
    )


def test_what_hosts_write_stays_where_an_operator_finds_it(control: Path, folder: Path) -> None:
    logs = {
        path.parts[-5].rpartition("-")[0] for path in folder.glob("hosts/*/ray/*/logs/raylet.out")
    }
    assert logs >= hosts(control).keys()
