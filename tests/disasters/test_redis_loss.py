"""Redis dies under a running head: what is in its file comes back, what is lost for good does not.

Ray's GCS ends with its Redis, and with it the head; a kubelet would start it again.
"""

import asyncio
import time
from collections.abc import Iterator

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
from tests.e2e.application import Role, linked_engines, title

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.needs("redis-server"),
]

PACE = {"ttft_ms": 50, "tpot_ms": 20, "tpot_per_seq_ms": 2}
NUM_TOKENS = 60
PER_S = 2.0
SOON_S, LATER_S = 90.0, 300.0
# Nine times as long is longer than `SOON_S`.
AWAY_S = 40.0


@pytest.fixture(scope="module")
def application() -> Iterator[LastingApplication]:
    kind = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
    args = args_of(model_on({"compute_class": "spot", "replicas": 2}, pace=PACE))
    with LastingApplication(args, {"slices": [{**kind, "count": 2}]}) as running:
        yield running


def has_gcs(application: LastingApplication) -> bool:
    return any("gcs_server" in title(process).split(" ")[0] for process in application.processes())


def num_raylets(application: LastingApplication) -> int:
    return sum(title(each).split(" ")[0].endswith("/raylet") for each in application.processes())


def wait_until_not(application: LastingApplication, timeout_s: float) -> float:
    """Waits until there is no GCS; how long it took."""
    since_s = time.monotonic()
    while has_gcs(application):
        assert time.monotonic() - since_s < timeout_s, "Ray's GCS lives on without Redis"
        time.sleep(0.1)
    return time.monotonic() - since_s


async def test_redis_that_is_back_with_its_file_costs_nothing(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = application.lasting_processes()
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await load.more_answers(10, SOON_S)
        await on(application, "kill_redis")
        lived_s = await asyncio.to_thread(wait_until_not, application, SOON_S)
        await load.more_answers(30, LATER_S)
        await on(application, "start_redis")
        # Redis alone brings nobody back: it is the head that has to be started again.
        await on(application, "kill_head")
        await start_head(application)
        await load.more_answers(30, LATER_S)
        await asyncio.to_thread(application.wait_linked, 2, LATER_S)
    assert load.wrong() == [], application.bad_ends()
    assert [each for each in load.asked if each.status != 200] == []
    after = application.lasting_processes()
    assert [role for role, pids in before.items() if not pids <= after[role]] == []
    report(
        capsys,
        f"Redis killed: the GCS follows within {lived_s:.1f} s; with Redis' file and a new head "
        f"{len(load.asked)} of {len(load.asked)} whole, no process of ours replaced",
    )


async def test_host_lost_while_the_head_is_away_is_replaced_once_it_is_back(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory once waited for nine times as long as it had waited for the head."""
    agent = application.processes(Role.HOST_AGENT)[-1]
    await on(application, "kill_head")
    away_s = time.monotonic()
    agent.suspend()
    await asyncio.to_thread(
        application.wait_fleet, lambda fleet: linked_engines(fleet) == {MODEL: 1}, SOON_S
    )
    agent.resume()
    await asyncio.sleep(max(0.0, AWAY_S - (time.monotonic() - away_s)))
    await start_head(application)
    back_s = time.monotonic()
    await asyncio.to_thread(application.wait_linked, 2, SOON_S)
    report(
        capsys,
        f"a slice lost while the head was away for {back_s - away_s:.0f} s: another engine linked "
        f"{time.monotonic() - back_s:.1f} s after it was back",
    )


async def test_redis_that_is_lost_for_good_leaves_a_head_that_knows_no_host(
    application: LastingApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    assert num_raylets(application) == 5
    await on(application, "kill_head")
    await on(application, "kill_redis", lose=True)
    await on(application, "start_redis")
    await start_head(application)
    since_s = time.monotonic()
    # To the new head they belong to another cluster. Each ends; in a pod, so does its container.
    while num_raylets(application) > 1:
        assert time.monotonic() - since_s < LATER_S
        await asyncio.sleep(0.2)
    report(
        capsys,
        f"Redis lost for good: every host's raylet has ended {time.monotonic() - since_s:.1f} s "
        "after the new head was up",
    )
