"""A simulated cluster that does not come up leaves no process behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from deployments.simulation.node_processes import processes_below

pytestmark = pytest.mark.process

START = """
from deployments.simulation.cluster import SimulatedCluster
from deployments.simulation.plan import SimulationPlan

kind = {"name": "a", "compute_class": "spot", "generation": "v6e", "topology": "2x2", "count": 1}
with SimulatedCluster(SimulationPlan.model_validate({"slices": [kind]}), 0):
    raise AssertionError("it came up before it was interrupted")
"""


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
