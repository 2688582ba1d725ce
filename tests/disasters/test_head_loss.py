"""Ray's head dies whole and comes back from Redis; then Redis dies. No request is the worse for it.

Real Ray nodes, a real Redis, Serve's own controller with our policy in it; engines are paced.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.disasters.lasting import (
    MODEL,
    LastingApplication,
    args_of,
    model_on,
    on,
    report,
    resumes,
    shipped_policy,
    start_head,
)
from tests.disasters.load import ConstantLoad
from tests.e2e.application import Role, linked_engines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.needs("redis-server"),
]

# Alone a stream takes 1.5 s; six at once on one engine are what the objective allows.
PACE = {"ttft_ms": 50, "tpot_ms": 20, "tpot_per_seq_ms": 5, "max_num_seqs": 16}
NUM_TOKENS = 60
PER_S = 2.0
# What two slices do not carry at the objective.
STEP_PER_S = 6.0
SOON_S, LATER_S = 90.0, 300.0


@pytest.fixture(scope="module")
def application() -> Iterator[LastingApplication]:
    spot = {"compute_class": "spot", "min_replicas": 2, "max_replicas": 4, "replicas": 2}
    plan = {
        "slices": [
            {
                "name": "spot",
                "compute_class": "spot",
                "generation": "v6e",
                "topology": "1x1",
                "count": 4,
                "returns_after_s": 1,
            }
        ]
    }
    policy = shipped_policy({"spot": {"usd_per_slice_hour": 4.0, "provisioning_s": 5.0}})
    args = args_of(model_on(spot, pace=PACE), request_deadline_s=120.0)
    with LastingApplication(args, plan, policy) as running:
        yield running


def slowest_ttft_s(load: ConstantLoad, since_s: float, until_s: float) -> float:
    return max((each.ttft_s or 0.0 for each in load.sent_since(since_s, until_s)), default=0.0)


async def test_streams_go_on_without_a_head_and_nothing_of_ours_is_replaced(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = application.lasting_processes()
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(20, SOON_S)
        killed_s = time.monotonic()
        await on(application, "kill_head")
        assert application.processes(Role.CONTROLLER) == []
        await load.more_answers(60, LATER_S)
        # What a load balancer asks the hosts' proxies.
        assert await asyncio.to_thread(health_status, application) == httpx.codes.OK
        assert linked_engines(await asyncio.to_thread(application.fleet))[MODEL] >= 2
        started_s = time.monotonic()
        await start_head(application)
        back_s = time.monotonic()
        await asyncio.to_thread(wait_controller, application)
        controlled_s = time.monotonic()
        await load.more_answers(40, LATER_S)
    assert load.wrong() == [], application.bad_ends()
    assert [each for each in load.asked if each.status != 200] == []
    after = application.lasting_processes()
    assert [role for role, pids in before.items() if not pids <= after[role]] == []
    report(
        capsys,
        f"head away for {back_s - killed_s:.0f} s under {PER_S:g} streams/s: "
        f"{len(load.asked)} of {len(load.asked)} whole, slowest TTFT "
        f"{slowest_ttft_s(load, 0, killed_s):.2f} s before, "
        f"{slowest_ttft_s(load, killed_s, started_s):.2f} s without a head, "
        f"{slowest_ttft_s(load, started_s, float('inf')):.2f} s after; head up after "
        f"{back_s - started_s:.1f} s, Serve's controller after {controlled_s - started_s:.1f} s",
    )


async def test_slice_and_directory_that_die_without_a_head_are_replaced_when_it_is_back(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    application.wait_linked(2, LATER_S)
    resumes_before = resumes(application)
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(10, SOON_S)
        await on(application, "kill_head")
        fleet = await asyncio.to_thread(application.fleet)
        lost, num_linked = ready_slice(fleet), linked_engines(fleet)[MODEL]
        lost_s = time.monotonic()
        await on(application, "kill", name=lost["name"])
        for process in application.processes(Role.DIRECTORY):
            process.kill()
        await load.more_answers(60, LATER_S)
        # The dead slice is another one's work; the directory's word is not needed for that.
        fleet = await asyncio.to_thread(application.fleet)
        assert linked_engines(fleet) == {MODEL: num_linked - 1}
        started_s = time.monotonic()
        await start_head(application)
        await asyncio.to_thread(application.wait_linked_at_least, num_linked, LATER_S)
        whole_s = time.monotonic()
        await load.more_answers(20, LATER_S)
    assert load.wrong() == [], application.bad_ends()
    assert [each for each in load.asked if each.status != 200] == []
    moved = resumes(application) - resumes_before
    report(
        capsys,
        f"slice and directory killed without a head: {len(load.asked)} of {len(load.asked)} "
        f"whole, {moved} resumed, slowest TTFT "
        f"{slowest_ttft_s(load, lost_s, started_s):.2f} s; whole again "
        f"{whole_s - started_s:.0f} s after the head was started",
    )


async def test_drain_is_heeded_and_the_policy_scales_after_a_head_was_lost(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    drained = ready_slice(application.wait_linked(2, LATER_S))
    at_s = time.time()
    name = await asyncio.to_thread(simulated_name, application, drained)
    await on(application, "drain", name=name, notice_s=15.0)
    application.wait_fleet(lambda fleet: has_ended(fleet, drained["name"], at_s), LATER_S)
    application.wait_linked(2, LATER_S)
    since_s = time.monotonic()
    async with ConstantLoad(application.base_url, MODEL, STEP_PER_S, NUM_TOKENS) as load:
        await asyncio.to_thread(application.wait_linked_at_least, 3, LATER_S)
    assert load.wrong() == [], application.bad_ends()
    report(
        capsys,
        f"a third slice serves {time.monotonic() - since_s:.0f} s after the step to "
        f"{STEP_PER_S:g} streams/s; {len(load.asked)} of {len(load.asked)} whole",
    )


def simulated_name(application: LastingApplication, row: dict[str, Any]) -> str:
    """The simulated slice of a row.

    A slice that came while Ray still listed a dead host of the same name is named by its node too.
    """
    names = [each["name"] for each in application.simulation("describe")["slices"]]
    return next(name for name in names if f"{row['name']}-".startswith(f"{name}-"))


def ready_slice(fleet: dict[str, Any]) -> dict[str, Any]:
    """One that serves."""
    return next(each for each in fleet["slices"] if each["state"] == "ready")


def has_ended(fleet: dict[str, Any], name: str, since_s: float) -> bool:
    """Whether a life on this slice has ended since (wall clock)."""
    return any(
        each["name"] == name and each["history"][-1]["at_s"] > since_s for each in fleet["ended"]
    )


def health_status(application: LastingApplication) -> int:
    """What a load balancer gets when it asks a gateway host's proxy."""
    return httpx.get(f"{application.base_url}/-/healthz", timeout=5).status_code


def wait_controller(application: LastingApplication) -> None:
    """Waits until Serve's controller has taken up the application again."""
    application.wait_fleet(lambda _: is_running(application), LATER_S)


def is_running(application: LastingApplication) -> bool:
    try:
        answer = httpx.get(f"{application.dashboard_url}/api/serve/applications/", timeout=5)
        return answer.json()["applications"]["slicewise"]["status"] == "RUNNING"
    except (httpx.HTTPError, ValueError, KeyError):
        return False
