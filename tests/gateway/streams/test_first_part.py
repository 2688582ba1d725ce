"""The head of a stream and its first event are one write, whichever way the stream takes."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.gateway.test_forged_resume import CONFIG
from tests.noted_writes import NotedWrites

from .over_http import http_server
from .test_known_chats import body_of, fleet_of
from .test_plain_streams import CHAT

pytestmark = pytest.mark.imports_vllm

WRITES: list[bytes] = []


class _NotingProtocol(HttpToolsProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(NotedWrites(transport, WRITES))  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [1, 12], ids=["one-part", "several"])
async def test_head_and_first_event_are_one_write(max_tokens: int) -> None:
    fleet = await fleet_of(CONFIG)
    body = body_of({"max_tokens": max_tokens})
    async with http_server(fleet.edge, _NotingProtocol) as port:
        for is_known in (False, False, True):
            WRITES.clear()
            _, was_known = await fleet.over_http(port, body)
            assert was_known == is_known
            first = WRITES[0]
            assert first.startswith(b"HTTP/1.1 200")
            assert b'data: {"id"' in first
            assert not any(b"HTTP/1.1" in each for each in WRITES[1:])
            assert WRITES[-1].endswith(b"0\r\n\r\n")
    fleet.close()


async def whole(port: int, request: bytes) -> bytes:
    """What comes on a connection until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_connection_that_the_client_wants_closed_is_closed_behind_the_whole_answer() -> None:
    fleet = await fleet_of(CONFIG)
    body = json.dumps(body_of({"max_tokens": 1})).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    async with http_server(fleet.edge) as port:
        for _ in range(3):
            asked = SimpleNamespace(task=asyncio.create_task(whole(port, head.encode() + body)))
            await fleet._answered(asked)  # type: ignore[arg-type]
            answer = await asked.task
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    fleet.close()
