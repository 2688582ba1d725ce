"""Nodes of control processes are killed, and the whole control pool is replaced node by node.

Real Ray nodes and Serve; engines are paced, and their process ids tell whether one was loaded
again. Nodes have the labels that our worker groups give them, and are told to leave by the command
of the rendered pods. All of them are on this machine, and HAProxy is on the head, which stays.
"""

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deployments.manifests.pods.control import CONTROL_NODES_MODULE
from tests.disasters.lasting import MODEL, args_of, model_on, report
from tests.disasters.load import ConstantLoad
from tests.disasters.off_slices import replica_nodes, tell_to_leave, until_dead
from tests.e2e.application import Role, RunningApplication, linked_engines

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

PACE = {"ttft_ms": 50, "tpot_ms": 500, "max_num_seqs": 128}
# A stream takes 16 s, so that 64 are under way at 4 a second.
NUM_TOKENS, PER_S = 32, 4.0
NUM_STREAMS, NUM_ENGINES, NUM_GATEWAYS = 64, 4, 2
ROLLOUT = {"gateway_drain_s": 30.0, "drain_s": 10.0}
ENGINES = f"engine-{MODEL}-spot"
SOON_S, LATER_S = 240.0, 600.0


@pytest.fixture
def application() -> Iterator[RunningApplication]:
    spot = {"compute_class": "spot", "replicas": NUM_ENGINES}
    kind = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
    args = args_of(model_on(spot, pace=PACE), request_deadline_s=120.0) | {"rollout": ROLLOUT}
    plan = {
        "head_cpus": 0,
        "gateway_hosts": 2,
        "control_hosts": 2,
        "slices": [kind | {"count": NUM_ENGINES, "returns_after_s": 1}],
    }
    with RunningApplication(args, through="sim", plan=plan) as running:
        yield running


def engines(application: RunningApplication) -> set[int]:
    return {each.pid for each in application.processes(Role.ENGINE_HOST)}


def gateways(application: RunningApplication) -> set[int]:
    return {each.pid for each in application.processes(Role.GATEWAY)}


def engine_ids(fleet: dict[str, Any]) -> set[str]:
    return {row["engine_id"] for row in fleet["slices"] if row["state"] == "ready"}


def hosts(application: RunningApplication) -> dict[str, dict[str, str]]:
    """The hosts without chips by Ray's id."""
    described = application.simulation("describe")["hosts"]
    return {each["node_id"]: each for each in described}


def roles(application: RunningApplication) -> dict[str, Counter[str]]:
    """The roles of the nodes on which replicas run, by deployment."""
    known = hosts(application)
    return {
        name: Counter(known[node]["role"] if node in known else "gone" for node in nodes)
        for name, nodes in replica_nodes(application).items()
    }


def placed_on(role: str) -> dict[str, Counter[str]]:
    """Control processes are on nodes of that role, gateways on their own."""
    return {
        ENGINES: Counter({role: NUM_ENGINES}),
        "directory": Counter({role: 1}),
        "dashboard": Counter({role: 1}),
        "gateway": Counter({"gateway": NUM_GATEWAYS}),
    }


async def until_placed(application: RunningApplication, wanted: dict[str, Counter[str]]) -> None:
    deadline_s = time.monotonic() + LATER_S
    while (found := await asyncio.to_thread(roles, application)) != wanted:
        assert time.monotonic() < deadline_s, f"replicas are on {found}, not on {wanted}"
        await asyncio.sleep(0.5)


async def until_whole(application: RunningApplication, ids: set[str]) -> dict[str, Any]:
    """Waits until every engine of before, and no other, takes requests."""

    def is_whole(fleet: dict[str, Any]) -> bool:
        return engine_ids(fleet) == ids and linked_engines(fleet) == {MODEL: NUM_ENGINES}

    return await asyncio.to_thread(application.wait_fleet, is_whole, LATER_S)


async def begin(application: RunningApplication) -> tuple[set[int], set[str]]:
    """Waits until all is where it belongs; the engines' process ids, and their own."""
    await until_placed(application, placed_on("control"))

    def is_whole(fleet: dict[str, Any]) -> bool:
        return len(engine_ids(fleet)) == NUM_ENGINES

    fleet = await asyncio.to_thread(application.wait_fleet, is_whole, LATER_S)
    # What a gateway's pod would have waited for is there.
    address = (await asyncio.to_thread(application.simulation, "describe"))["ray_address"]
    asked = [sys.executable, "-m", CONTROL_NODES_MODULE, address, "2", "60"]
    said = await asyncio.to_thread(
        subprocess.run, asked, check=True, capture_output=True, text=True, timeout=SOON_S
    )
    assert said.stdout == "control_nodes found=2 wanted=2\n"
    return engines(application), engine_ids(fleet)


async def test_killed_nodes_of_control_processes_cost_no_gateway_no_engine_and_no_stream(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    had, ids = await begin(application)
    serving = gateways(application)
    took_s = []
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        # Without a node of their own they are beside the gateways: worse, and served all the same.
        for name, role in (("control-0", "control"), ("control-1", "gateway")):
            await load.more_answers(NUM_STREAMS, SOON_S)
            killed_s = time.monotonic()
            await asyncio.to_thread(application.simulation, "kill_host", name=name)
            await until_placed(application, placed_on(role))
            fleet = await until_whole(application, ids)
            took_s.append(time.monotonic() - killed_s)
        await load.more_answers(NUM_STREAMS, SOON_S)
    assert load.wrong() == [], application.bad_ends()
    assert [each for each in load.asked if each.status != httpx.codes.OK] == []
    assert (engines(application), gateways(application)) == (had, serving)
    assert {row["cause"] for row in fleet["ended"]} <= {"adopted"}
    report(
        capsys,
        f"two nodes of control processes killed, one after the other, under {NUM_STREAMS} streams: "
        f"{len(load.asked)} of {len(load.asked)} whole; all replicas on the second after "
        f"{took_s[0]:.0f} s, beside the gateways {took_s[1]:.0f} s after its end; no engine loaded "
        "again",
    )


async def test_control_pool_is_replaced_node_by_node_and_nobody_notices(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    had, ids = await begin(application)
    old = sorted((await asyncio.to_thread(hosts, application)).values(), key=lambda h: h["name"])
    assert [each["role"] for each in old] == ["control", "control", "gateway", "gateway"]
    began_s = time.monotonic()
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(NUM_STREAMS, SOON_S)
        for host in old:
            await replace(application, host)
            await until_whole(application, ids)
        took_s = time.monotonic() - began_s
        fleet = await until_whole(application, ids)
        await load.more_answers(NUM_STREAMS, SOON_S)
    assert load.wrong() == [], application.bad_ends()
    assert [each for each in load.asked if each.status != httpx.codes.OK] == []
    assert engines(application) == had
    assert {row["cause"] for row in fleet["ended"]} <= {"adopted"}
    new = {each["name"] for each in (await asyncio.to_thread(hosts, application)).values()}
    assert new.isdisjoint(each["name"] for each in old)
    report(
        capsys,
        f"the control pool's {len(old)} nodes replaced one by one in {took_s:.0f} s under "
        f"{NUM_STREAMS} streams: {len(load.asked)} of {len(load.asked)} whole, no engine loaded "
        "again",
    )


async def replace(application: RunningApplication, host: dict[str, str]) -> None:
    """As an upgrade of a node pool does it: its pod leaves, and another comes once it has gone."""
    await tell_to_leave(application, host["node_id"], host["role"], ROLLOUT)
    await until_dead(application, host["node_id"], LATER_S)
    # The container ends with Ray's node.
    await asyncio.to_thread(application.simulation, "kill_host", name=host["name"])
    await asyncio.to_thread(application.simulation, "add_host", role=host["role"])
    await until_placed(application, placed_on("control"))
