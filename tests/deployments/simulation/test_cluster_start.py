"""A simulated cluster comes up though a host fails once, and else leaves no process behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from deployments.simulation.hosts.namespaces import check_permitted
from deployments.simulation.node_processes import processes_below
from tests.hosts.permission import skipped_where_refused

pytestmark = pytest.mark.process

START = """
from deployments.simulation.cluster import SimulatedCluster
from deployments.simulation.plan import SimulationPlan

kind = {"name": "a", "compute_class": "spot", "generation": "v6e", "topology": "2x2", "count": 1}
with SimulatedCluster(SimulationPlan.model_validate({"slices": [kind]}), 0):
    raise AssertionError("it came up before it was interrupted")
"""

# A host is ended as soon as it has a raylet: its node is then not known to the head in time.
START_OVER = """
import contextlib, os, sys, threading, time
from pathlib import Path
import psutil
from deployments.simulation.cluster import SimulatedCluster
from deployments.simulation.hosts.namespaces import Hosts
from deployments.simulation.plan import SimulationPlan

def end_hosts(count):
    ended = {}
    while len(ended) < count:
        for host in hosts_with_raylet() - set(ended):
            processes = processes_of(host)
            with contextlib.suppress(OSError, IndexError):
                # As long as it is open, its number is no other host's.
                ended[host] = open(f"/proc/{processes[0].pid}/ns/pid")
                for each in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        time.sleep(0.01)

def hosts_with_raylet():
    here = os.readlink("/proc/self/ns/pid")
    # One that has ended since has no command line: `None`.
    found = psutil.process_iter(["name", "cmdline"])
    raylets = [each for each in found if each.info["name"] == "raylet"]
    folder = os.environ["RAY_TMPDIR"]
    return {host_of(each) for each in raylets if folder in str(each.info["cmdline"])} - {here, None}

def processes_of(host):
    return [each for each in psutil.process_iter() if host_of(each) == host]

def host_of(process):
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError:
        return None

kind = {"name": "a", "compute_class": "spot", "generation": "v6e", "topology": "2x2", "count": 1}
with Hosts(Path(sys.argv[1]), joins_machine=True) as hosts:
    threading.Thread(target=end_hosts, args=(int(sys.argv[2]),), daemon=True).start()
    plan = SimulationPlan.model_validate({"slices": [kind]})
    with SimulatedCluster(plan, 0, network=hosts) as cluster:
        (each,) = cluster.describe()["slices"]
        print(each["name"], each["hosts"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 2])
def test_slice_whose_host_did_not_start_is_made_again_once(kills: int) -> None:
    with (
        skipped_where_refused(),
        tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder,
    ):
        check_permitted()
        run = subprocess.run(
            [sys.executable, "-c", START_OVER, folder, str(kills)],
            env=os.environ | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    if kills == 1:
        assert (run.returncode, run.stdout) == (0, "a-0 [0]\n"), run.stderr
    else:
        assert run.returncode != 0
        assert "NodeStartError" in run.stderr


@pytest.mark.long
def test_ctrl_c_while_the_head_starts_ends_what_has_started() -> None:
    # Ray's sockets lie below it: their paths are short.
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder:
        starting = subprocess.Popen(
            [sys.executable, "-c", START],
            env=os.environ | {"RAY_TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started: list[psutil.Process] = []
        until_s = time.monotonic() + 120
        while not started and starting.poll() is None and time.monotonic() < until_s:
            below = processes_below([starting.pid])
            started = [each for each in below if "gcs_server" in each.name()]
        starting.send_signal(signal.SIGINT)
        started += processes_below([starting.pid])
        starting.wait(60)
        _, alive = psutil.wait_procs(started, timeout=30)
        for each in alive:
            each.kill()
        assert started, "the head had begun"
        assert alive == []
        assert starting.returncode != 0
