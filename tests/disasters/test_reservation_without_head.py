"""A slice that is given back while Ray has no head is free when there is one again."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from deployments.simulation.control import call
from deployments.simulation.deployed import lasting_environment
from deployments.start.ports import free_ports
from deployments.start.serve import child_environment, dashboard_port
from tests.disasters.lasting import start_head_on
from tests.e2e.application import PROJECT_ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.needs("redis-server"),
]

SOON_S = 240.0
# Ray's own is a minute.
RAY_GIVES_UP_AFTER_S = 4
PLAN = {
    "head_cpus": 0,
    "gateway_hosts": 1,
    "slices": [
        {
            "name": "spot",
            "compute_class": "spot",
            "generation": "v6e",
            "topology": "1x1",
            "count": 2,
        }
    ],
}
CLUSTER = """
import signal, sys, threading, yaml
from pathlib import Path
from deployments.simulation.cluster import SimulatedCluster
from deployments.simulation.control import ControlServer
from deployments.simulation.plan import parse_plan
from deployments.simulation.redis import RedisServer

is_over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: is_over.set())
folder, dashboard, gcs, redis = Path(sys.argv[1]), *map(int, sys.argv[2:])
plan = parse_plan(yaml.safe_load((folder / "plan.yaml").read_text()))
with RedisServer(folder / "redis", redis) as store:
    with SimulatedCluster(plan, dashboard, gcs_port=gcs, redis=store) as cluster:
        with ControlServer(cluster, folder / "c" / "s"):
            is_over.wait()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    # Ray's sockets lie below it: their paths are short.
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def environment(folder: Path) -> Mapping[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))}
    quick = {"RAY_gcs_server_request_timeout_seconds": str(RAY_GIVES_UP_AFTER_S)}
    there = {"PYTHONPATH": str(PROJECT_ROOT)}
    made = child_environment(lasting_environment(inherited | quick | there, 1), str(folder))
    return {k: v for k, v in made.items() if k != "RAY_ADDRESS"}


@pytest.fixture
def cluster(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """A cluster that may lose its head; its control socket."""
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    ports = [str(dashboard_port(environment)), *map(str, free_ports(2))]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(folder), *ports],
            env=dict(environment),
            cwd=PROJECT_ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as running,
    ):
        try:
            wait_for(folder / "c" / "s", "", running)
            yield folder / "c" / "s"
        finally:
            running.terminate()
            running.wait(120)


def wait_for(path: Path, words: str, running: subprocess.Popen[bytes] | None = None) -> str:
    """Waits until a file is there and has these words; what it holds."""
    deadline_s = time.monotonic() + SOON_S
    while not path.exists() or (words and words not in path.read_text()):
        held = path.read_text() if path.is_file() else "nothing"
        assert time.monotonic() < deadline_s, f"{words!r} not in {path}: {held}"
        assert running is None or running.poll() is None, "the cluster did not start"
        time.sleep(0.1)
    return path.read_text() if path.is_file() else ""


def wait_in_logs(folder: Path, words: str) -> None:
    """Waits until a worker of the cluster has logged these words."""
    deadline_s = time.monotonic() + SOON_S
    while not any(
        words in log.read_text(errors="replace")
        for log in folder.glob("ray/session_*/logs/worker-*.err")
    ):
        assert time.monotonic() < deadline_s, f"{words!r} is in no log"
        time.sleep(0.1)


def test_slice_given_back_without_a_head_is_free_again(
    cluster: Path, folder: Path, environment: Mapping[str, str]
) -> None:
    address = call(cluster, "describe")["ray_address"]
    subprocess.run(
        [sys.executable, "-m", "tests.disasters.holder", address, str(folder)],
        env=dict(environment),
        cwd=PROJECT_ROOT,
        check=True,
        timeout=SOON_S,
    )
    said = folder / "said"
    wait_for(said, "held")
    call(cluster, "kill_head")
    (folder / "leave").touch()
    # Ray has given up on both; without us the group would stand for good.
    wait_for(said, "refused: Ray has no head that could reserve a slice")
    wait_in_logs(folder, "release_waits")
    assert "released" not in said.read_text()
    start_head_on(cluster)
    assert "groups: ['REMOVED']" in wait_for(said, "groups")
