"""Lines that are refused wait without a worker, and every line is handed out until it is done."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.batches.lines import BatchLine, LineLimits
from serving.gateway.batches.running.line_queue import AskedLine, LineQueue
from serving.gateway.batches.running.line_source import LineSource

PATH = "/v1/completions"
LIMITS = LineLimits(max_lines=1000, max_line_bytes=10_000)
HOUR_S = 3600.0
DEADLINE_S = 30.0


async def blocking(call: Callable[..., Any], *values: Any) -> Any:
    await asyncio.sleep(0)
    return call(*values)


def file_of(models: Iterable[str]) -> io.BytesIO:
    """A line for each of these models, whose id is its number from 0, and its prompt too."""
    lines = (
        {"custom_id": str(at), "method": "POST", "url": PATH, "body": {"model": name, "prompt": at}}
        for at, name in enumerate(models)
    )
    return io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def queue_of(
    models: str, most: int, most_kept_bytes: int = 10_000, *, is_known: bool = True
) -> tuple[LineQueue, io.BytesIO]:
    file = file_of(models)
    source = LineSource(file, PATH, LIMITS, (), blocking)
    known = set(models) if is_known else ()
    return LineQueue(source, lambda: most, known, most_kept_bytes), file


async def taken(queue: LineQueue) -> AskedLine:
    async with asyncio.timeout(DEADLINE_S):
        asked = await queue.next()
    assert asked is not None
    return asked


def number_of(asked: AskedLine) -> int:
    assert isinstance(asked.line, BatchLine)
    number = int(asked.line.custom_id)
    assert json.loads(asked.line.body)["prompt"] == number
    return number


async def is_waiting(queue: LineQueue) -> bool:
    """Whether the next line has still to be waited for when all else has been done."""
    asking = asyncio.create_task(queue.next())
    for _ in range(20):
        await asyncio.sleep(0)
    is_waiting = not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return is_waiting


async def test_lines_of_a_model_that_refuses_are_passed_and_come_later() -> None:
    queue, _ = queue_of("xxxxyyxy", 2)
    for _ in range(2):
        queue.put_back(await taken(queue), HOUR_S)
    asked = [await taken(queue) for _ in range(2)]
    assert [number_of(each) for each in asked] == [4, 5]
    for each in asked:
        queue.done(each)
    asked = [await taken(queue)]
    assert [number_of(each) for each in asked] == [7]
    queue.done(asked[0])
    assert await is_waiting(queue)


async def test_lines_that_were_passed_are_handed_out_once_there_is_room() -> None:
    queue, _ = queue_of("xxxxy", 2)
    first = [await taken(queue) for _ in range(2)]
    queue.put_back(first[0], 0.0)
    assert await taken(queue) is first[0]
    assert number_of(await taken(queue)) == 4
    queue.done(first[1])
    assert number_of(await taken(queue)) == 2


@pytest.mark.parametrize("most_kept_bytes", [0, 10_000])
async def test_line_that_waits_keeps_its_body_or_is_read_again(most_kept_bytes: int) -> None:
    queue, _ = queue_of("xxx", 3, most_kept_bytes)
    asked = [await taken(queue) for _ in range(3)]
    asked[1].num_faults = 1
    for each in asked:
        queue.put_back(each, 0.0)
    sizes = [each.num_bytes for each in asked]
    assert all(sizes) if most_kept_bytes else not any(sizes)
    again = [await taken(queue) for _ in range(3)]
    assert [number_of(each) for each in again] == [0, 1, 2]
    assert [(each.num_refusals, each.num_faults) for each in again] == [(1, 0), (1, 1), (1, 0)]


async def test_those_that_were_refused_are_half_of_what_is_asked_while_there_are_others() -> None:
    queue, _ = queue_of("xxxx" + "y" * 10, 4)
    for asked in [await taken(queue) for _ in range(4)]:
        queue.put_back(asked, 0.0)
    numbers = [number_of(await taken(queue)) for _ in range(6)]
    assert sorted(numbers) == [0, 1, 4, 5, 6, 7]
    assert number_of(await taken(queue)) == 2  # more of `y` may not be out


@pytest.mark.parametrize("is_known", [True, False])
async def test_file_is_read_on_only_for_lines_that_may_be_asked(*, is_known: bool) -> None:
    queue, file = queue_of("x" * 500, 2, is_known=is_known)
    for _ in range(2):
        queue.put_back(await taken(queue), HOUR_S)
    assert await is_waiting(queue)
    assert (file.tell() < len(file.getvalue()) // 2) == is_known


async def test_who_waits_goes_on_when_a_line_is_done_or_comes_back_sooner() -> None:
    queue, _ = queue_of("xxx", 2)
    first, second = [await taken(queue) for _ in range(2)]
    queue.put_back(first, HOUR_S)
    asking = asyncio.create_task(taken(queue))
    await asyncio.sleep(0)
    queue.put_back(second, 0.0)
    assert await asking is second
    asking = asyncio.create_task(taken(queue))
    await asyncio.sleep(0)
    queue.done(second)
    assert number_of(await asking) == 2


@pytest.mark.parametrize(
    ("answered", "refused", "is_refused"),
    [("", "", False), ("x", "", False), ("x", "y", False), ("xy", "y", True), ("", "y", True)],
)
async def test_model_without_engines_says_nothing_of_others(
    answered: str, refused: str, *, is_refused: bool
) -> None:
    queue, _ = queue_of(answered + refused, 9)
    asked = [await taken(queue) for _ in answered + refused]
    for each in asked[: len(answered)]:
        queue.done(each)
    for each in asked[len(answered) :]:
        queue.put_back(each, HOUR_S)
    assert queue.take_is_refused() is is_refused
    assert queue.take_is_refused() is False


@settings(deadline=None, max_examples=60)
@given(
    st.text(alphabet="xyz", max_size=40),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(0, 200),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_line_is_handed_out_until_it_is_done_and_never_twice_at_once(
    models: str, most: list[int], most_kept_bytes: int, is_known: bool, chance: Any
) -> None:
    done: Counter[int] = Counter()
    in_hand: set[int] = set()
    most_now = [1]

    async def work(queue: LineQueue) -> None:
        while (asked := await queue.next()) is not None:
            number = number_of(asked)
            assert number not in in_hand
            in_hand.add(number)
            await asyncio.sleep(0)
            in_hand.remove(number)
            most_now[0] = chance.choice(most)
            if chance.random() < 0.5:
                queue.put_back(asked, 0.0)
            else:
                queue.done(asked)
                done[number] += 1

    async def run() -> None:
        source = LineSource(file_of(models), PATH, LIMITS, (), blocking)
        known = set(models) if is_known else ()
        queue = LineQueue(source, lambda: most_now[0], known, most_kept_bytes)
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for _ in range(max(most)):
                group.create_task(work(queue))

    asyncio.run(run())
    assert done == Counter(range(len(models)))
