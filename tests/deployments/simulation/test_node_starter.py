"""What a node's start comes to is said by whoever tried: started, or why not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.simulation.hosts.namespaces import Hosts
from deployments.simulation.hosts.node_starter import NodeOrder
from deployments.simulation.hosts.nodes import NodeStarter, NodeStartError
from tests.hosts.permission import skipped_where_refused

pytestmark = pytest.mark.process

SOON_S = 60.0
# Longer than any process's number.
NO_PROCESS = 2**22 + 1


@pytest.fixture
def starter() -> Iterator[NodeStarter]:
    starter = NodeStarter()
    yield starter
    starter.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Hosts]:
    with skipped_where_refused(), Hosts(tmp_path) as network:
        yield network


def test_what_ray_refuses_is_said(starter: NodeStarter, network: Hosts) -> None:
    host = network.add("host")
    log = str(network.folder / "start.log")
    outcome = starter.start(NodeOrder("n", host.first_pid, log, {"num_chips": 4}))
    with pytest.raises(NodeStartError, match="num_chips"):
        outcome.result(SOON_S)
    # It was tried on the host, and nothing of it is left there but what it wrote.
    assert [path.parent.name for path in network.folder.glob("hosts/*/start.log")] == ["host-0"]
    assert len(host.processes()) == 1


def test_host_that_is_gone_is_said(starter: NodeStarter) -> None:
    outcome = starter.start(NodeOrder("n", NO_PROCESS, "/nowhere", {}))
    with pytest.raises(NodeStartError, match=f"/proc/{NO_PROCESS}"):
        outcome.result(SOON_S)


def test_end_of_the_program_is_that_of_every_order(starter: NodeStarter) -> None:
    os.kill(starter.pid, signal.SIGSTOP)
    outcome = starter.start(NodeOrder("n", NO_PROCESS, "/nowhere", {}))
    os.kill(starter.pid, signal.SIGKILL)
    with pytest.raises(NodeStartError, match="has ended"):
        outcome.result(SOON_S)
    with pytest.raises(NodeStartError, match="has ended"):
        starter.start(NodeOrder("n", NO_PROCESS, "/nowhere", {}))
