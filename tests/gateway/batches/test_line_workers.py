"""As many lines are answered at once as are wanted, and every one of them once."""

import asyncio

import pytest

from serving.gateway.batches.running.line_workers import LineWorkers


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
