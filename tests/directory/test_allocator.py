"""Who asks for slices and waits is answered when somebody looks."""

import asyncio

from serving.directory.allocator import SliceAllocator
from serving.directory.pending_grants import SliceWish
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.supply.found import SliceMatches
from tests.supply_builders import host

FREE = Slice("s-0", (host("s-0-pod-0"),))
NONE, ONE = SliceMatches((), {"s-0": "it is taken"}), SliceMatches((FREE,), {})


def wish(replica_id: str, since_s: float = 0.0) -> SliceWish:
    return SliceWish(replica_id, SliceRequest("spot", "v6e-4", "2x2", 1, 4), since_s)


async def asking(allocator: SliceAllocator, *wishes: SliceWish, timeout_s: float = 60.0) -> list:
    tasks = [asyncio.create_task(allocator.acquire(each, timeout_s)) for each in wishes]
    await allocator.has_askers.wait()
    return tasks


async def test_asker_is_answered_at_the_first_look_that_finds_a_slice() -> None:
    allocator = SliceAllocator()
    (task,) = await asking(allocator, wish("r1"))
    allocator.decide(lambda _: NONE, {}, 0.0)
    assert not task.done()
    allocator.decide(lambda _: ONE, {}, 1.0)
    assert (await task).slices == (FREE,)
    assert not allocator.has_askers.is_set()


async def test_oldest_asker_is_answered_first() -> None:
    allocator = SliceAllocator()
    young, old = await asking(allocator, wish("young", 9.0), wish("old", 1.0))
    allocator.decide(lambda _: ONE, {}, 0.0)
    assert (await old).slices == (FREE,)
    assert not young.done()
    young.cancel()


async def test_asker_that_gets_nothing_in_time_learns_the_last_reason() -> None:
    allocator = SliceAllocator()
    (task,) = await asking(allocator, wish("r1"), timeout_s=0.05)
    allocator.decide(lambda _: NONE, {}, 0.0)
    grant = await task
    assert (grant.slices, grant.reason) == ((), "no slice is free (s-0: it is taken)")
    assert not allocator.has_askers.is_set()


async def test_asker_that_was_cancelled_is_granted_nothing() -> None:
    allocator = SliceAllocator()
    (task,) = await asking(allocator, wish("r1"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    allocator.decide(lambda _: ONE, {}, 0.0)
    (other,) = await asking(allocator, wish("r2"))
    allocator.decide(lambda _: ONE, {}, 0.0)
    assert (await other).slices == (FREE,)
