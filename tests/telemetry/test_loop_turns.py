"""The longest turn of an event loop, on a clock that jumps and on a real one."""

import asyncio
import time

import pytest

from serving.telemetry.loop_turns import LoopTurns
from tests.engine.simulated_time import run_simulated


async def stand_still(for_s: float) -> None:
    """Moves the loop's own clock on, as a turn of this length does."""
    asyncio.get_running_loop()._clock.now_s += for_s  # type: ignore[attr-defined]
    await asyncio.sleep(0)


def test_longest_turn_is_kept_for_half_a_minute_and_gone_after_a_minute() -> None:
    async def check() -> None:
        turns = LoopTurns()
        turns.start()
        await asyncio.sleep(5)
        assert turns.longest_s == 0.0
        await stand_still(0.25)
        await asyncio.sleep(1)
        assert turns.longest_s == pytest.approx(0.25, abs=0.011)
        await stand_still(0.1)
        await asyncio.sleep(30)
        assert turns.longest_s == pytest.approx(0.25, abs=0.011)
        await asyncio.sleep(30)
        assert turns.longest_s == 0.0
        turns.stop()

    run_simulated(check())


def test_turn_over_several_windows_is_seen() -> None:
    async def check() -> None:
        turns = LoopTurns()
        turns.start()
        await stand_still(100.0)
        await asyncio.sleep(0.1)
        assert turns.longest_s == pytest.approx(100.0, abs=0.011)
        turns.stop()
        turns.stop()

    run_simulated(check())


async def test_turn_of_a_real_loop_is_seen_whatever_it_did() -> None:
    turns = LoopTurns()
    turns.start()
    try:
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 - the turn that is to be seen
        # The timer that was due meanwhile is run before one that is due later.
        await asyncio.sleep(0.001)
        # A timer of 10 ms may have been due within it.
        assert turns.longest_s >= 0.15
    finally:
        turns.stop()


async def test_turn_that_waits_takes_no_cpu_time_and_one_that_works_does() -> None:
    turns = LoopTurns()
    turns.start()
    try:
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 - it waits
        await asyncio.sleep(0.001)
        waited_cpu_s = turns.longest_cpu_s
        work_until_s = time.thread_time() + 0.2
        while time.thread_time() < work_until_s:
            pass
        await asyncio.sleep(0.001)
        assert waited_cpu_s < 0.1 < 0.19 <= turns.longest_cpu_s
    finally:
        turns.stop()
