"""Answers are written together and in order, none is lost, and lines wait for room only."""

import asyncio
from collections.abc import Sequence

import pytest

from serving.gateway.batches.records import LineAnswer
from serving.gateway.batches.running.answer_writer import AnswerWriter

MANY_BYTES = 10_000


class Kept:
    """What was written, in its writes. The next write waits until it may go on."""

    def __init__(self) -> None:
        self.writes: list[list[int]] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.fault: Exception | None = None

    async def write(self, answers: Sequence[LineAnswer]) -> None:
        await self.may_write.wait()
        if self.fault is not None:
            raise self.fault
        self.writes.append([answer.line for answer in answers])


def answer(line: int, num_bytes: int = 1) -> LineAnswer:
    return LineAnswer(line, is_failure=False, record=b"x" * num_bytes)


async def turn() -> None:
    """Lets all that is ready go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def ended(running: "asyncio.Task[None]") -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_answers_that_come_while_one_is_written_are_written_together() -> None:
    kept = Kept()
    writer = AnswerWriter(kept.write, 0.0, 100, MANY_BYTES)
    running = asyncio.create_task(writer.run())
    kept.may_write.clear()
    await writer.add(answer(1))
    await turn()
    for line in (2, 3):
        await writer.add(answer(line))
    kept.may_write.set()
    await turn()
    await ended(running)
    await writer.flush()
    assert kept.writes == [[1], [2, 3]]


async def test_writes_are_apart_and_the_last_one_does_not_wait() -> None:
    kept = Kept()
    writer = AnswerWriter(kept.write, 3600.0, 100, MANY_BYTES)
    running = asyncio.create_task(writer.run())
    await writer.add(answer(1))
    await turn()
    await writer.add(answer(2))
    await turn()
    assert kept.writes == [[1]]
    await ended(running)
    await writer.flush()
    assert kept.writes == [[1], [2]]


async def test_line_waits_if_too_many_are_unwritten() -> None:
    kept = Kept()
    kept.may_write.clear()
    writer = AnswerWriter(kept.write, 0.0, 2, MANY_BYTES)
    await writer.add(answer(1))
    second = asyncio.create_task(writer.add(answer(2)))
    await turn()
    assert not second.done()
    running = asyncio.create_task(writer.run())
    await turn()
    assert second.done()
    await writer.add(answer(3))
    kept.may_write.set()
    await ended(running)
    await writer.flush()
    assert [line for lines in kept.writes for line in lines] == [1, 2, 3]


async def test_line_waits_while_too_many_bytes_are_not_written() -> None:
    kept = Kept()
    kept.may_write.clear()
    writer = AnswerWriter(kept.write, 0.0, 100, 10)
    running = asyncio.create_task(writer.run())
    await writer.add(answer(1, 6))
    second = asyncio.create_task(writer.add(answer(2, 6)))
    await turn()  # the first is being written, and counts until it has been
    assert not second.done()
    kept.may_write.set()
    await second
    await ended(running)
    await writer.flush()
    assert kept.writes == [[1], [2]]


async def test_answer_of_a_line_that_is_stopped_while_it_waits_is_kept() -> None:
    kept = Kept()
    writer = AnswerWriter(kept.write, 0.0, 100, 10)
    stopped = asyncio.create_task(writer.add(answer(1, 11)))
    await turn()
    assert not stopped.done()
    await ended(stopped)
    await writer.flush()
    assert kept.writes == [[1]]


async def test_write_has_so_many_bytes_or_one_answer() -> None:
    kept = Kept()
    writer = AnswerWriter(kept.write, 0.0, 100, 10)
    lines = enumerate((9, 9, 25, 5, 5, 1), start=1)
    adding = [asyncio.create_task(writer.add(answer(*line))) for line in lines]
    await turn()
    await writer.flush()
    await asyncio.gather(*adding)
    assert kept.writes == [[1], [2], [3], [4, 5], [6]]


async def test_write_that_is_under_way_at_the_end_is_waited_for() -> None:
    kept = Kept()
    kept.may_write.clear()
    writer = AnswerWriter(kept.write, 0.0, 100, MANY_BYTES)
    running = asyncio.create_task(writer.run())
    await writer.add(answer(1))
    await turn()
    await ended(running)
    flushing = asyncio.create_task(writer.flush())
    await turn()
    assert not flushing.done()
    kept.may_write.set()
    await flushing
    assert kept.writes == [[1]]


async def test_write_that_fails_ends_the_writer() -> None:
    kept = Kept()
    kept.fault = OSError("the disk is full")
    writer = AnswerWriter(kept.write, 0.0, 100, MANY_BYTES)
    running = asyncio.create_task(writer.run())
    await writer.add(answer(1))
    with pytest.raises(OSError, match="disk is full"):
        await running
