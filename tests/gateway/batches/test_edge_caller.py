"""A line's request ends when who asks for it is cancelled, whatever the request makes of that."""

import asyncio
from typing import Any

import pytest

from serving.gateway.batches.lines import BatchLine
from serving.gateway.batches.records import Batch, KeyOfBatch
from serving.gateway.batches.running.edge_caller import EdgeCaller

BATCH = Batch("b1", "a", KeyOfBatch("", None), "/v1/completions", "file-1", "24h", 0.0, 3600.0)
LINE = BatchLine(1, "line-1", b"{}")


async def test_cancelled_caller_ends_though_the_request_is_answered_instead() -> None:
    asked = asyncio.Event()
    num_asked = 0

    async def answer_line(_scope: Any, _receive: Any, send: Any, _batch: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as vLLM does
            await send({"type": "http.response.start", "status": 499, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    async def ask_again_and_again() -> None:
        caller = EdgeCaller(answer_line)
        while True:
            await caller.ask(BATCH, LINE)

    asking = asyncio.create_task(ask_again_and_again())
    await asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert num_asked == 1
