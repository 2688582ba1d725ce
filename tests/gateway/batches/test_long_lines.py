"""Long lines are read in a process of their own, and are what they would be if read here."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serving.domain.limits import MIB
from serving.gateway.batches.lines import BatchLine, LineLimits, RefusedLine, line_or_refusal
from serving.gateway.batches.running.long_lines import LongLines
from serving.gateway.forks.bodies.sizes import LARGE_BYTES
from serving.gateway.forks.messages import ForkLimits

from .lanes import Answering, begin, chats, ended, gateway_in, records

pytestmark = pytest.mark.process

PATH = "/v1/chat/completions"
LIMITS = LineLimits(max_lines=10, max_line_bytes=2 * MIB)
DEADLINE_S = 60.0
LONG = "x" * LARGE_BYTES


def line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"model": "m", "x": LONG}}
    return json.dumps(whole | changes).encode()


CASES = {
    "a request": line(),
    "another place of its body": line(custom_id='{"model": "m"}', body={"model": "m"}, x=LONG),
    "no JSON": line()[:-1],
    "no UTF-8": line() + b"\xff",
    "another route": line(url="/" + LONG),
    "a stream": line(body={"stream": True, "x": LONG}),
    "a long name": line(body={"model": LONG}),
    "a long id": line(custom_id=LONG),
    "too deep": line(body={"x": [[]] * 200, "y": "HERE"}).replace(
        b'"HERE"', b"[" * 150 + b"]" * 150
    )
    + b" " * LARGE_BYTES,
    "far too deep": b"[" * LARGE_BYTES * 2,
    "too long": line(body={"x": LONG * 8}),
}


@pytest.fixture
async def lines() -> AsyncIterator[LongLines]:
    lines = LongLines(asyncio.get_running_loop())
    async with asyncio.timeout(DEADLINE_S):
        yield lines
    await lines.wait_closed()


async def read(lines: LongLines, text: bytes) -> BatchLine | RefusedLine:
    return await asyncio.to_thread(lines.read, 7, text, PATH, LIMITS)


async def test_long_line_is_what_it_would_be_if_it_was_read_here(lines: LongLines) -> None:
    for name, text in CASES.items():
        assert len(text) > LARGE_BYTES
        assert await read(lines, text) == line_or_refusal(7, text, PATH, LIMITS), name
    assert lines.pid is not None


async def test_short_line_is_read_here(lines: LongLines) -> None:
    text = line(
        body={"model": "m", "x": "x" * (LARGE_BYTES - len(line(body={"model": "m", "x": ""})))}
    )
    assert len(text) == LARGE_BYTES
    assert isinstance(await read(lines, text), BatchLine)
    assert lines.pid is None


async def test_line_that_takes_too_much_is_refused_with_its_name() -> None:
    little = ForkLimits(cpu_s=5, wall_s=DEADLINE_S, memory_bytes=MIB)
    lines = LongLines(asyncio.get_running_loop(), little)
    try:
        found = await read(lines, line(body={"x": LONG * 6}))
    finally:
        await lines.wait_closed()
    assert isinstance(found, RefusedLine)
    assert (found.custom_id, found.code) == ("a", "line_too_complex")
    assert "5 s of processor time and 1 MiB" in found.message


async def test_batch_with_long_lines_is_answered(tmp_path: Path) -> None:
    content = chats(2) + chats(1, user=LONG).replace(b"line-0", b"line-2")
    stream = chats(1, stream=True, user=LONG).replace(b"line-0", b"line-3")
    async with (
        gateway_in(tmp_path, Answering(), max_body_bytes=MIB) as gateway,
        gateway.client() as client,
    ):
        try:
            batch = await ended(client, await begin(client, content))
            output = await records(client, batch.output_file_id)
            assert [each["custom_id"] for each in output] == ["line-0", "line-1", "line-2"]
            batch = await ended(client, await begin(client, content + stream))
            assert [(fault.line, fault.code) for fault in batch.errors.data] == [
                (4, "stream_not_allowed")
            ]
        finally:
            gateway.edge.close()
