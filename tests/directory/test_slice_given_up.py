"""The fleet directory where Serve ends a replica whose slice is not the one to go.

The product's directory over a Ray by hand; replicas are what they say to it.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from ray.experimental import internal_kv

from serving.config.application import LinkConfig
from serving.directory.deployment import FleetDirectory
from serving.domain.plan_report import STALE_AFTER_S
from serving.domain.slice_records import HandOn, SliceRecord
from serving.domain.supply.keys import SupplyKeys
from tests.kuberay.ray_by_hand import RayByHand, standing_in
from tests.kuberay.replicas import until
from tests.supply_builders import hosts_of, life, plan_that_drains


def ready(name: str) -> SliceRecord:
    return replace(
        life(name, hosts_of(name), at_s=time.time()),
        engine_id=f"engine of {name}",
        control=("10.0.0.1", 1),
        fingerprint="f",
    )


@pytest.fixture
async def directory() -> AsyncIterator[FleetDirectory]:
    with standing_in(RayByHand(random.Random(1)), "slicewise"):
        before = asyncio.all_tasks()
        made = FleetDirectory.__new__(FleetDirectory)
        await made.__init__(LinkConfig())  # type: ignore[misc] # as Serve does
        tasks = asyncio.all_tasks() - before
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def plan(*drain_order: str, age_s: float = 0.0) -> None:
    """Stores a plan, as the policy does."""
    report = plan_that_drains("demo", drain_order, time.time() - age_s)
    internal_kv._internal_kv_put(SupplyKeys("slicewise").plan, report, overwrite=True)


async def test_replica_whose_slice_goes_first_is_asked_to_give_it_up(
    directory: FleetDirectory,
) -> None:
    first, second = ready("first"), ready("second")
    for record in (first, second):
        assert await directory.renew(record) is None
    plan("first", "second")
    assert await directory.hand_on("second", is_shutdown=False) is HandOn.EXCHANGED
    orphans = [
        each.replica_id for each in (await directory.watch("", 0.0)).records if each.is_orphan
    ]
    assert orphans == ["second"]

    async def is_asked() -> bool:
        request = await directory.renew(first)
        return request is not None and not request.is_replaced

    await until(is_asked, "the first replica is asked to give its slice up", 10.0)
    # Its next life takes the engine over, and is asked for nothing.
    waits = replace(life("first~2", at_s=time.time()), fingerprint="f")
    await directory.renew(waits)
    engine = await directory.find_engine("first~2", 5.0)
    assert engine is not None
    assert engine.replica_id == "second"
    assert await directory.renew(replace(second, replica_id="first~2")) is None
    await directory.forget("first")
    assert await directory.hand_on("first~2", is_shutdown=False) is HandOn.ENDS


@pytest.mark.parametrize("age_s", [None, STALE_AFTER_S + 1])
async def test_without_a_plan_the_replicas_own_slice_goes(
    directory: FleetDirectory, age_s: float | None
) -> None:
    for name in ("first", "second"):
        await directory.renew(ready(name))
    if age_s is not None:
        plan("first", "second", age_s=age_s)
    assert await directory.hand_on("second", is_shutdown=False) is HandOn.ENDS
    assert not any(each.is_orphan for each in (await directory.watch("", 0.0)).records)
    assert await directory.hand_on("second", is_shutdown=True) is HandOn.WANTED
