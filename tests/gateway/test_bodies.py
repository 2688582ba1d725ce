"""Bodies of requests within bounds: of one, of all in flight, and of the time for one."""

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Message

from serving.domain.errors import (
    BodyTimeoutError,
    MalformedRequestError,
    NoRoomForBodyError,
    RequestTooLargeError,
)
from serving.gateway.dispatch.admission import BodyLimits, BodyRoom

from .test_http_edge import EchoFrontend, client_of, edge_over

LIMITS = BodyLimits(max_bytes=100, max_bytes_of_all=150, timeout_s=5.0)
DEADLINE_S = 10.0


def sends(*chunks: bytes, ends: bool = True):  # type: ignore[no-untyped-def] # an ASGI receive
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    if ends:
        messages[-1]["more_body"] = False

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    return receive


def length(num_bytes: int) -> list[tuple[bytes, bytes]]:
    return [(b"content-length", b"%d" % num_bytes)]


async def test_declared_body_has_its_room_before_it_comes_and_until_the_request_ends() -> None:
    room = BodyRoom(LIMITS)
    first = room.hold()
    reading = asyncio.create_task(first.read(sends(b"x", ends=False), length(100)))
    await asyncio.sleep(0)
    assert room.num_held == 100
    with pytest.raises(NoRoomForBodyError) as caught:
        await room.hold().read(sends(b"y" * 51), length(51))
    assert caught.value.retry_after_s is not None
    second = room.hold()
    assert await second.read(sends(b"y" * 50), length(50)) == b"y" * 50
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    first.give_back()
    assert room.num_held == 50
    second.give_back()
    second.give_back()
    assert room.num_held == 0


async def test_body_without_a_length_has_room_as_it_comes() -> None:
    room = BodyRoom(LIMITS)
    first, second = room.hold(), room.hold()
    assert await first.read(sends(b"x" * 40, b"x" * 40), []) == b"x" * 80
    with pytest.raises(NoRoomForBodyError):
        await second.read(sends(b"y" * 60, b"y" * 20), [])
    second.give_back()
    assert room.num_held == 80


@pytest.mark.parametrize("headers", [length(101), length(3), []])
async def test_body_longer_than_one_may_be_is_refused_whatever_it_declares(
    headers: list[tuple[bytes, bytes]],
) -> None:
    with pytest.raises(RequestTooLargeError):
        await BodyRoom(LIMITS).hold().read(sends(b"x" * 60, b"x" * 41), headers)


async def test_body_that_does_not_come_in_time_is_refused() -> None:
    room = BodyRoom(BodyLimits(100, 150, timeout_s=0.01))
    with pytest.raises(BodyTimeoutError, match=r"within 0\.01 s"):
        await room.hold().read(sends(b"x", ends=False), length(5))


async def test_client_that_leaves_in_the_middle_is_told_apart() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(MalformedRequestError, match="left"):
        await BodyRoom(LIMITS).hold().read(receive, length(5))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0)


async def test_edge_holds_a_body_until_its_answer_has_ended_and_refuses_politely() -> None:
    edge = edge_over(EchoFrontend("m"), max_body_bytes=100, body_budget_bytes=150)
    body = b'{"model": "m", "prompt": "linger"}'.ljust(90)
    async with client_of(edge) as client:
        first = asyncio.create_task(client.post("/v1/completions", content=body))
        await until(lambda: edge.num_body_bytes == 90)
        refused = await client.post("/v1/completions", content=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_room_for_body"
        assert refused.headers["retry-after"] == "5"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: edge.num_body_bytes == 0)
        answer = await client.post("/v1/completions", content=body.replace(b"linger", b"answer"))
        assert answer.status_code == 200
