"""What is relied on of Ray between hosts: an actor ends with the process that made it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deployments.simulation.hosts.namespaces import Host, Hosts, check_permitted
from tests.hosts.permission import skipped_where_refused
from tests.hosts.ray_nodes import RayNodes, node_environment

pytestmark = [pytest.mark.process, pytest.mark.long]

START_S = 120.0
END_S = 60.0
# As an engine core with a worker on another host: not detached, and busy for ever.
_CORE = """
import os, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0, resources={"second": 1})
class Worker:
    def namespace(self):
        return os.stat("/proc/self/ns/pid").st_ino

    def run(self):
        while True:
            pass

worker = Worker.remote()
namespace = ray.get(worker.namespace.remote())
running = worker.run.remote()
print(os.stat("/proc/self/ns/pid").st_ino, namespace, flush=True)
ray.get(running)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host, RayNodes]]:
    """The first of two hosts is the head; with their Ray."""
    with skipped_where_refused():
        check_permitted()
    with Hosts() as network:
        first, second = network.add("first"), network.add("second")
        nodes = RayNodes(first, node_environment(network.folder), tmp_path)
        nodes.start_head(START_S)
        nodes.join(second, {}, {"second": 1}, {})
        nodes.wait_joined(START_S)
        yield first, second, nodes


def test_actor_on_another_host_ends_when_its_owner_is_killed(
    hosts: tuple[Host, Host, RayNodes],
) -> None:
    first, second, nodes = hosts
    program = (sys.executable, "-c", _CORE, nodes.address)
    started = first.start(*program, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    core_namespace, worker_namespace = started.stdout.readline().split()
    assert core_namespace != worker_namespace
    (core,) = first.processes(f"{sys.executable} -c")
    nodes.wait_until(lambda: second.processes("ray::Worker.run") != [], START_S)
    (worker,) = second.processes("ray::Worker.run")
    core.kill()
    assert psutil.wait_procs([worker], timeout=END_S)[1] == []
