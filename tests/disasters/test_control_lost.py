"""What commands engines is lost: Serve's controller, the head for a quarter of an hour, a host.

Real Ray nodes, a real Redis and Serve; engines are paced, and their process ids tell whether one
was loaded again. Streams go to a gateway that lives: those of a gateway that dies break.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.disasters.lasting import (
    MODEL,
    LastingApplication,
    args_of,
    model_on,
    on,
    report,
    start_head,
)
from tests.disasters.load import ConstantLoad
from tests.e2e.application import Role, RunningApplication, linked_engines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(2700),
    pytest.mark.needs("redis-server"),
]

PACE = {"ttft_ms": 50, "tpot_ms": 500, "max_num_seqs": 128}
# A stream takes 16 s, so that 64 are under way at 4 a second.
NUM_TOKENS, PER_S = 32, 4.0
NUM_STREAMS = 64
NUM_ENGINES, NUM_GATEWAYS = 4, 2
HEAD_AWAY_S = 900.0
SOON_S, LATER_S = 240.0, 600.0


@pytest.fixture(scope="module")
def application() -> Iterator[LastingApplication]:
    spot = {"compute_class": "spot", "replicas": NUM_ENGINES}
    kind = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
    args = args_of(model_on(spot, pace=PACE), request_deadline_s=120.0)
    plan = {"slices": [kind | {"count": NUM_ENGINES, "returns_after_s": 1}]}
    with LastingApplication(args, plan) as running:
        running.wait_linked(NUM_ENGINES, LATER_S)
        yield running


def engines(application: RunningApplication) -> set[int]:
    return {each.pid for each in application.processes(Role.ENGINE_HOST)}


def engine_ids(fleet: dict[str, Any]) -> set[str]:
    return {row["engine_id"] for row in fleet["slices"] if row["state"] == "ready"}


def is_whole(load: ConstantLoad) -> bool:
    return load.wrong() == [] and all(each.status == httpx.codes.OK for each in load.asked)


def own_address(gateway: psutil.Process) -> str:
    """Where a gateway's process itself answers, without a proxy before it.

    It may be starting yet: the fleet is whole as soon as the other gateway has every engine.
    """
    deadline_s = time.monotonic() + LATER_S
    while time.monotonic() < deadline_s:
        for connection in gateway.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                url = f"http://127.0.0.1:{connection.laddr.port}"
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                        return url
        time.sleep(0.5)
    raise AssertionError("the gateway listens nowhere")


async def test_killed_controller_costs_no_engine_and_no_stream(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = application.lasting_processes()
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(NUM_STREAMS, SOON_S)
        (controller,) = application.processes(Role.CONTROLLER)
        controller.kill()
        killed_s = time.monotonic()
        while not (found := application.processes(Role.CONTROLLER)) or found == [controller]:
            assert time.monotonic() - killed_s < SOON_S, "no other controller has come"
            await asyncio.sleep(0.2)
        await load.more_answers(NUM_STREAMS, SOON_S)
    assert is_whole(load)
    assert application.lasting_processes() == before
    report(
        capsys,
        f"Serve's controller killed under {NUM_STREAMS} streams: {len(load.asked)} of "
        f"{len(load.asked)} whole, no process of ours replaced",
    )


async def test_head_that_is_away_for_a_quarter_of_an_hour_costs_no_engine_and_no_stream(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = application.lasting_processes()
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(NUM_STREAMS, SOON_S)
        await on(application, "kill_head")
        killed_s = time.monotonic()
        # The time itself is the subject: whatever waits for the head must not give up in it.
        while time.monotonic() - killed_s < HEAD_AWAY_S:
            await load.more_answers(NUM_STREAMS, SOON_S)
        away_s = time.monotonic() - killed_s
        assert application.lasting_processes() == before
        await start_head(application)
        await load.more_answers(NUM_STREAMS, SOON_S)
    assert is_whole(load)
    fleet = await asyncio.to_thread(application.wait_linked, NUM_ENGINES, LATER_S)
    assert engines(application) == before[Role.ENGINE_HOST]
    assert [row for row in fleet["ended"] if row["cause"] != "adopted"] == []
    report(
        capsys,
        f"head away for {away_s:.0f} s under {NUM_STREAMS} streams: {len(load.asked)} of "
        f"{len(load.asked)} whole, no engine loaded again",
    )


@pytest.fixture
def on_two_hosts() -> Iterator[RunningApplication]:
    """The same with HAProxy at the head, so that each gateway has an address of its own."""
    spot = {"compute_class": "spot", "replicas": NUM_ENGINES}
    kind = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
    args = args_of(model_on(spot, pace=PACE), request_deadline_s=120.0)
    slices = [kind | {"count": NUM_ENGINES, "returns_after_s": 1}]
    plan = {"head_cpus": 0, "gateway_hosts": 2, "slices": slices}
    with RunningApplication(args, through="sim", plan=plan) as running:
        yield running


async def test_killed_host_of_a_gateway_costs_no_engine_and_no_stream_of_the_other_gateway(
    on_two_hosts: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    application = on_two_hosts

    def is_whole_fleet(fleet: dict[str, Any]) -> bool:
        gateways = application.processes(Role.GATEWAY)
        return linked_engines(fleet) == {MODEL: NUM_ENGINES} and len(gateways) == NUM_GATEWAYS

    fleet = await asyncio.to_thread(application.wait_fleet, is_whole_fleet, LATER_S)
    had, ids = engines(application), engine_ids(fleet)
    # A worker process is a child of its node's raylet.
    leaves, stays = application.processes(Role.GATEWAY)
    assert leaves.ppid() != stays.ppid()
    raylet = psutil.Process(leaves.ppid())
    doomed = [raylet, *raylet.children(recursive=True)]
    replicas = {each.pid for each in application.processes(Role.SLICE_REPLICA)}
    lost = replicas & {each.pid for each in doomed}
    assert lost, "no replica is on the host: its end would show nothing"
    address = await asyncio.to_thread(own_address, stays)
    async with ConstantLoad(address, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(NUM_STREAMS, SOON_S)
        killed_s = time.monotonic()
        for process in doomed:
            process.kill()

        def is_adopted(fleet: dict[str, Any]) -> bool:
            adopted = [row for row in fleet["ended"] if row["cause"] == "adopted"]
            return len(adopted) >= len(lost) and engine_ids(fleet) == ids

        await asyncio.to_thread(application.wait_fleet, is_adopted, LATER_S)
        adopted_s = time.monotonic() - killed_s
        await load.more_answers(NUM_STREAMS, SOON_S)
    assert is_whole(load)
    assert engines(application) == had
    report(
        capsys,
        f"a gateways' host killed under {NUM_STREAMS} streams of the other gateway: "
        f"{len(load.asked)} of {len(load.asked)} whole; the engines of {len(lost)} replicas were "
        f"adopted within {adopted_s:.0f} s, none was loaded again",
    )
