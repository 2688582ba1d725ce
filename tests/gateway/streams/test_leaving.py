"""A client that leaves ends what waits for something else; many that leave do not stop the rest."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from starlette.types import Message

from serving.gateway.streams.leaving import (
    ClientLeftError,
    ReceiveInTurns,
    unless_client_leaves,
)
from serving.gateway.streams.turns import REQUESTS_PER_TURN, Turns

LEFT: Message = {"type": "http.disconnect"}


class Connection:
    """A client that leaves when it is told."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.num_asked = 0

    async def receive(self) -> Message:
        self.num_asked += 1
        await self.left.wait()
        return LEFT


async def test_work_that_does_not_wait_is_done_without_a_look_at_the_client() -> None:
    connection = Connection()

    async def work() -> int:
        return 7

    assert await unless_client_leaves(connection.receive, work()) == 7
    assert connection.num_asked == 0


@pytest.mark.parametrize("pauses", [0.0, 0.001])
async def test_work_that_waits_goes_on_where_it_stood(pauses: float) -> None:
    connection = Connection()
    tasks = []

    async def work() -> str:
        tasks.append(asyncio.current_task())
        await asyncio.sleep(pauses)
        async with asyncio.timeout(10):
            await asyncio.sleep(pauses)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        tasks.append(asyncio.current_task())
        return "done"

    assert await unless_client_leaves(connection.receive, work()) == "done"
    assert tasks == [asyncio.current_task()] * 2
    assert connection.num_asked == 1


async def test_a_client_that_leaves_ends_the_work() -> None:
    connection = Connection()
    ended = []

    async def work() -> None:
        try:
            connection.left.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ClientLeftError):
        await unless_client_leaves(connection.receive, work())
    assert ended == [True]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_makes_an_answer_of_being_cancelled_has_none() -> None:
    connection = Connection()

    async def answers_all_the_same() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            connection.left.set()
            await asyncio.Event().wait()
        return "the client has left"

    with pytest.raises(ClientLeftError):
        await unless_client_leaves(connection.receive, answers_all_the_same())


async def test_errors_of_the_work_are_its_callers() -> None:
    async def fails(wait: Callable[[], "asyncio.Future[None]"] | None) -> None:
        if wait is not None:
            await wait()
        raise LookupError("of the work")

    def later() -> "asyncio.Future[None]":
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, None)
        return future

    for wait in (None, later):
        with pytest.raises(LookupError, match="of the work"):
            await unless_client_leaves(Connection().receive, fails(wait))


async def test_who_cancels_the_task_is_not_taken_for_the_client() -> None:
    async def waits() -> None:
        await unless_client_leaves(Connection().receive, asyncio.Event().wait())

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_clients_that_leave_together_a_few_are_seen_to_in_each_turn() -> None:
    leaving, connection = Turns(), Connection()
    in_this_turn, most = 0, 0

    def next_turn() -> None:
        nonlocal in_this_turn
        in_this_turn = 0
        asyncio.get_running_loop().call_soon(next_turn)

    async def serve() -> None:
        nonlocal in_this_turn, most
        with pytest.raises(ClientLeftError):
            await unless_client_leaves(
                ReceiveInTurns(connection.receive, leaving), asyncio.Event().wait()
            )
        in_this_turn += 1
        most = max(most, in_this_turn)

    serving = [asyncio.create_task(serve()) for _ in range(200)]
    await asyncio.sleep(0)
    next_turn()
    connection.left.set()
    await asyncio.gather(*serving)
    assert 1 <= most <= 2 * REQUESTS_PER_TURN
