"""A gateways' host leaves as its rendered pod does: Ray is told by the same words, under load.

Real Ray nodes and Serve; engines are paced. One thing is harder than on Kubernetes, where nobody
leads new connections to a pod that ends: both hosts listen on one port, and go on doing so.
"""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.disasters.lasting import MODEL, LastingApplication, args_of, model_on, report
from tests.disasters.load import ConstantLoad
from tests.disasters.off_slices import replica_nodes, tell_to_leave, until_dead, until_on
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


@pytest.fixture(scope="module")
def application() -> Iterator[LastingApplication]:
    spot = {"compute_class": "spot", "replicas": NUM_ENGINES}
    kind = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
    args = args_of(model_on(spot, pace=PACE), request_deadline_s=120.0) | {"rollout": ROLLOUT}
    plan = {"slices": [kind | {"count": NUM_ENGINES, "returns_after_s": 1}]}
    with LastingApplication(args, plan) as running:
        running.wait_linked(NUM_ENGINES, LATER_S)
        yield running


async def test_host_of_a_gateway_leaves_under_load_and_nobody_notices(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes: list[str] = []
    while len(nodes) < 2:
        await asyncio.sleep(0.5)
        nodes = (await asyncio.to_thread(replica_nodes, application))["gateway"]
    first, second = nodes
    engines = application.lasting_processes()[Role.ENGINE_HOST]
    assert len(engines) == NUM_ENGINES
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(20, SOON_S)
        told_s = time.monotonic()
        await tell_to_leave(application, first, "gateway", ROLLOUT)
        await until_on(application, "gateway", [second, second], LATER_S)
        moved_s = time.monotonic()
        await until_on(application, f"engine-{MODEL}-spot", [second] * NUM_ENGINES, LATER_S)
        left_s = time.monotonic()
        fleet = await asyncio.to_thread(application.wait_linked, NUM_ENGINES, LATER_S)
        await load.more_answers(20, SOON_S)
    assert load.wrong() == [], application.bad_ends()
    assert [each for each in load.asked if each.status != httpx.codes.OK] == []
    # Their replicas have gone, and other ones have taken them over: none was loaded again.
    assert application.lasting_processes()[Role.ENGINE_HOST] == engines
    assert {row["cause"] for row in fleet["ended"]} <= {"adopted"}
    # Nothing is left on it: its Ray node ends by itself, and with it its pod's container.
    await until_dead(application, first, LATER_S)
    report(
        capsys,
        f"a gateways' host told to leave under {PER_S:g} streams/s of "
        f"{NUM_TOKENS * PACE['tpot_ms'] / 1000:g} s: {len(load.asked)} of {len(load.asked)} whole; "
        f"gateways on the other host after {moved_s - told_s:.0f} s, its engines' replicas after "
        f"{left_s - told_s:.0f} s",
    )
