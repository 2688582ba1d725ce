"""The timer by which held tokens are released."""

import asyncio
import itertools
import time

import pytest

from serving.gateway.streams.hold import TokenHold, thread_times
from serving.gateway.streams.pace import HoldBounds, ThreadTimes

DEADLINE_S = 10.0


async def test_all_who_hold_tokens_are_called_once_and_together() -> None:
    hold = TokenHold(HoldBounds(0.01, 0.01))
    called: list[str] = []
    done = asyncio.Event()

    def first() -> None:
        called.append("first")

    def second() -> None:
        called.append("second")
        done.set()

    for release in (first, second, first):
        hold.arm(release)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert called == ["first", "second"]
    done.clear()
    hold.arm(second)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert called == ["first", "second", "second"]


async def test_who_is_gone_is_not_called() -> None:
    hold = TokenHold(HoldBounds(0.01, 0.01))
    done = asyncio.Event()
    hold.arm(lambda: pytest.fail("it has been taken back"))
    hold.arm(done.set)
    (gone, _) = hold._releases
    hold.disarm(gone)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()


async def test_timer_ends_with_the_last_who_waits() -> None:
    hold = TokenHold(HoldBounds(0.01, 0.01))
    called: list[int] = []

    def release() -> None:
        called.append(1)

    hold.arm(release)
    hold.disarm(release)
    hold.disarm(release)
    after = asyncio.Event()
    asyncio.get_running_loop().call_later(0.03, after.set)
    async with asyncio.timeout(DEADLINE_S):
        await after.wait()
    assert called == []


def test_nothing_waits_without_a_bound() -> None:
    assert TokenHold(HoldBounds()).present_s(1e9) == 0.0


def test_times_of_a_thread_are_its_own() -> None:
    before = thread_times()
    began_s = time.thread_time()
    while time.thread_time() < began_s + 0.02:
        pass
    after = thread_times()
    assert 0.02 <= after.computed_s - before.computed_s < 1.0
    assert after.waited_s >= before.waited_s >= 0.0


def test_hold_follows_how_busy_the_loop_is() -> None:
    times = map(ThreadTimes, itertools.count(0.0, 1.0))
    hold = TokenHold(HoldBounds(0.0, 0.1), lambda: next(times))
    assert hold.present_s(time.monotonic() + 0.2) == 0.1


def test_forced_hold_does_not_wait_for_load() -> None:
    assert TokenHold(HoldBounds(0.1, 0.1)).present_s(0.0) == 0.1
