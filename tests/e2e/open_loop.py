"""Load that does not wait for answers, as long as a block of a test lasts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx


@contextlib.asynccontextmanager
async def open_loop(
    base_url: str, body: Mapping[str, Any], per_s: float, timeout_s: float
) -> AsyncIterator[list[int]]:
    """Asks for completions at this rate; yields the statuses of the answers so far."""
    statuses: list[int] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits) as client:

        async def ask() -> None:
            statuses.append((await client.post("/v1/completions", json=body)).status_code)

        async def arrive() -> None:
            async with asyncio.TaskGroup() as asking:
                while not is_over.is_set():
                    asking.create_task(ask())
                    await asyncio.sleep(1 / per_s)

        is_over = asyncio.Event()
        arriving = asyncio.create_task(arrive())
        try:
            yield statuses
        finally:
            is_over.set()
            await arriving
