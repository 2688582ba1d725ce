"""As many lines are asked at once as it takes to be in time, and no more where they would wait."""

import asyncio

import pytest

from serving.gateway.batches.running.line_workers import (
    SEEN_FOR_S,
    LineRoom,
    LinesLeft,
    LineTuner,
    LineWorkers,
    lines_wanted,
)

HOUR_S = 3600.0


def wanted(left: LinesLeft, now: int = 64, *, has_room: bool = True) -> int:
    return lines_wanted(now, 64, 500, left, has_room=has_room)


@pytest.mark.parametrize(
    ("left", "num_lines"),
    [
        # 10,000 lines of 2 s in an hour are 5.6 at once.
        (LinesLeft(10_000, HOUR_S, 2.0), 64),
        # 100,000 lines of 3 s are 83 at once, and a fifth more.
        (LinesLeft(100_000, HOUR_S, 3.0), 100),
        # Never more than twice as many at once as there were.
        (LinesLeft(100_000, 60.0, 3.0), 128),
        # Too late is as soon as can be.
        (LinesLeft(1000, -5.0, 3.0), 128),
        # Nothing is known yet, and nothing is left.
        (LinesLeft(100_000, 60.0, None), 64),
        (LinesLeft(0, HOUR_S, 3.0), 64),
    ],
)
def test_lines_at_once_are_those_that_it_takes(left: LinesLeft, num_lines: int) -> None:
    assert wanted(left) == num_lines


def test_lines_that_wait_are_not_made_more_and_those_that_are_too_many_go() -> None:
    late = LinesLeft(100_000, 60.0, 3.0)
    assert wanted(late, has_room=False) == 64
    assert wanted(late, now=300, has_room=False) == 300
    assert wanted(late, now=400) == 500
    assert wanted(LinesLeft(100_000, HOUR_S, 3.0), now=400, has_room=False) == 100
    assert lines_wanted(64, 64, 0, late, has_room=True) == 64


def test_others_that_miss_their_objectives_halve_the_lines_until_they_do_not() -> None:
    late, is_pressed = LinesLeft(100_000, 60.0, 3.0), True
    tuner = LineTuner(LineRoom(lambda: 500, lambda: True, lambda: is_pressed), 64)

    def lines(now_s: float, num_now: int) -> int:
        return tuner.lines(now_s, num_now, late, is_refused=False)

    assert lines(0.0, 64) == 32
    # What is told then is of before.
    assert lines(SEEN_FOR_S - 1, 32) == 32
    assert lines(SEEN_FOR_S, 32) == 16
    assert lines(2 * SEEN_FOR_S, 1) == 1
    is_pressed = False
    assert lines(3 * SEEN_FOR_S - 1, 1) == 1
    assert lines(3 * SEEN_FOR_S, 1) == 2
    assert lines(3 * SEEN_FOR_S + 1, 2) == 4


class Lines:
    """Lines that are answered one by one, each when the test lets it."""

    def __init__(self, num_lines: int) -> None:
        self.num_left = num_lines
        self.num_asked = self.num_done = 0
        self.answered = asyncio.Semaphore(0)

    async def answer_one(self) -> bool:
        if not self.num_left:
            return False
        self.num_left -= 1
        self.num_asked += 1
        await self.answered.acquire()
        self.num_asked -= 1
        self.num_done += 1
        return True

    async def answer(self, count: int) -> None:
        for _ in range(count):
            self.answered.release()
        for _ in range(5):
            await asyncio.sleep(0)


async def test_workers_become_more_and_fewer_and_every_line_is_answered() -> None:
    lines = Lines(20)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        workers = LineWorkers(group, lines.answer_one, 2)
        await lines.answer(0)
        assert lines.num_asked == 2
        workers.want(6)
        await lines.answer(1)
        assert lines.num_asked == 6
        workers.want(1)
        assert lines.num_asked == 6  # what was asked is answered
        await lines.answer(5)
        assert lines.num_asked == 1
        workers.want(0)
        await lines.answer(3)
        assert lines.num_asked == 1
        workers.want(3)
        await lines.answer(100)
        await workers.wait_ended()
    assert (lines.num_done, lines.num_left) == (20, 0)
    assert workers.line_s is not None
    workers.want(5)
    assert workers.num_workers == 0


async def test_line_that_fails_ends_all() -> None:
    async def fails() -> bool:
        raise OSError("the file is gone")

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            await LineWorkers(group, fails, 3).wait_ended()

    with pytest.raises(ExceptionGroup):
        await run()


async def test_no_line_at_all_is_an_end() -> None:
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        await LineWorkers(group, Lines(0).answer_one, 3).wait_ended()
