"""A gateways' host leaves as its rendered pod does: Ray is told by the same words, under load.

Real Ray nodes and Serve; engines are paced. One thing is harder than on Kubernetes, where nobody
leads new connections to a pod that ends: both hosts listen on one port, and go on doing so.
"""

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray._raylet import GcsClient

from serving.domain.topology import slice_shape
from tests.deployments.manifests.examples import in_memory, one, raw_values
from tests.disasters.lasting import MODEL, LastingApplication, args_of, model_on, report
from tests.disasters.load import ConstantLoad
from tests.e2e.application import Role

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.needs("redis-server"),
]

# A stream takes 15 s: it began before its gateway was told to leave, and ends after it.
PACE = {"ttft_ms": 50, "tpot_ms": 500, "max_num_seqs": 64}
NUM_TOKENS, PER_S = 30, 1.0
NUM_ENGINES = 4
ROLLOUT = {"gateway_drain_s": 20.0, "drain_s": 10.0}
SOON_S, LATER_S = 120.0, 400.0
_DEAD = 1  # Ray's state of a node


@pytest.fixture(scope="module")
def application() -> Iterator[LastingApplication]:
    spot = {"compute_class": "spot", "replicas": NUM_ENGINES}
    kind = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
    args = args_of(model_on(spot, pace=PACE), request_deadline_s=120.0) | {"rollout": ROLLOUT}
    plan = {"slices": [kind | {"count": NUM_ENGINES, "returns_after_s": 1}]}
    with LastingApplication(args, plan) as running:
        running.wait_linked(NUM_ENGINES, LATER_S)
        yield running


def rendered_words() -> list[str]:
    """The command of a gateway's pod that is to end, but for its repetition and its wait."""
    raw = raw_values((slice_shape("v6e", "2x2"), "spot"))
    raw["applications"][0]["args"]["rollout"] = ROLLOUT
    cluster = one(in_memory(raw), "RayService").body["spec"]["rayClusterConfig"]
    container = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    text: str = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    return shlex.split(text.removeprefix("until ").partition(";")[0])


def replica_nodes(application: LastingApplication, deployment: str) -> list[str]:
    """The nodes of a deployment's replicas that run, by Serve's own word."""
    answer = httpx.get(f"{application.dashboard_url}/api/serve/applications/", timeout=60)
    found: dict[str, Any] = answer.json()["applications"]["slicewise"]["deployments"][deployment]
    return sorted(each["node_id"] for each in found["replicas"] if each["state"] == "RUNNING")


async def test_host_of_a_gateway_leaves_under_load_and_nobody_notices(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    described = await asyncio.to_thread(application.simulation, "describe")
    address = described["ray_address"]
    nodes: list[str] = []
    while len(nodes) < 2:
        await asyncio.sleep(0.5)
        nodes = await asyncio.to_thread(replica_nodes, application, "gateway")
    first, second = nodes
    engines = application.lasting_processes()[Role.ENGINE_HOST]
    assert len(engines) == NUM_ENGINES
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(20, SOON_S)
        ray, *words = rendered_words()
        program = Path(sys.executable).parent / ray
        told_s = time.monotonic()
        # In a pod there is one Ray node, and no need to say which.
        command = [str(program), *words, f"--address={address}", f"--node-id={first}"]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=SOON_S)
        await until_on(application, "gateway", [second, second])
        moved_s = time.monotonic()
        await until_on(application, f"engine-{MODEL}-spot", [second] * NUM_ENGINES)
        left_s = time.monotonic()
        fleet = await asyncio.to_thread(application.wait_linked, NUM_ENGINES, LATER_S)
        await load.more_answers(20, SOON_S)
    assert load.wrong() == []
    assert [each for each in load.asked if each.status != httpx.codes.OK] == []
    # Their replicas have gone, and other ones have taken them over: none was loaded again.
    assert application.lasting_processes()[Role.ENGINE_HOST] == engines
    assert {row["cause"] for row in fleet["ended"]} <= {"adopted"}
    # Nothing is left on it: its Ray node ends by itself, and with it its pod's container.
    gcs = GcsClient(address=address)
    deadline_s = time.monotonic() + LATER_S
    while {key.hex(): each.state for key, each in gcs.get_all_node_info().items()}[first] != _DEAD:
        assert time.monotonic() < deadline_s, "the node has not ended"
        await asyncio.sleep(1.0)
    report(
        capsys,
        f"a gateways' host told to leave under {PER_S:g} streams/s of "
        f"{NUM_TOKENS * PACE['tpot_ms'] / 1000:g} s: {len(load.asked)} of {len(load.asked)} whole; "
        f"gateways on the other host after {moved_s - told_s:.0f} s, its engines' replicas after "
        f"{left_s - told_s:.0f} s",
    )


async def until_on(application: LastingApplication, deployment: str, nodes: list[str]) -> None:
    """Waits until these, and no others, are the nodes of a deployment."""
    deadline_s = time.monotonic() + LATER_S
    while (found := await asyncio.to_thread(replica_nodes, application, deployment)) != nodes:
        assert time.monotonic() < deadline_s, f"{deployment} is on {found}, not on {nodes}"
        await asyncio.sleep(0.5)
