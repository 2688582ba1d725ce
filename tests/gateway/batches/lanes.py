"""A gateway's edge with a batch lane, and OpenAI's client in front of it, in one process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from starlette.types import Receive, Scope, Send

from serving.config.application import BatchesConfig, GatewayConfig
from serving.gateway.batches.lane import BatchLane
from serving.gateway.edge.http import HttpEdge
from tests.gateway.test_http_edge import EchoFrontend, edge_over

from .kept import Kept, KeptInFolder

DEADLINE_S = 60.0
FINAL = 501  # a fault that says that it stays
CHAT = "/v1/chat/completions"


class Answering(EchoFrontend):
    """A model that answers every chat with its own prompt, once the test lets it.

    `statuses` are what it answers first, one after the other. After `num_free` answers, if that is
    given, the others wait. An answer takes `pace_s`.
    """

    def __init__(self, name: str = "m", adapters: tuple[str, ...] = ()) -> None:
        super().__init__(name, adapters)
        self.statuses: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0
        self.num_running = 0
        self.most_running = 0
        self.num_free: int | None = None
        self.pace_s = 0.0

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.num_asked += 1
        if self.num_asked - 1 == self.num_free:
            self.may_answer.clear()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.may_answer.wait()
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
        finally:
            self.num_running -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        said = {"echo": body["messages"], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
        headers = [(b"content-type", b"application/json")]
        if status == 429:
            headers.append((b"retry-after", b"1"))
        if status == FINAL:
            headers.append((b"x-should-retry", b"false"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(said, indent=2).encode()})


class Gateway:
    """One gateway with a batch lane, by itself in a folder."""

    def __init__(self, place: Kept | Path, model: EchoFrontend, owner: str, **edge: Any) -> None:
        kept = KeptInFolder(place) if isinstance(place, Path) else place
        lane_config = BatchesConfig(**{"folder": "here"} | edge.pop("config", {}))
        gateway_config = GatewayConfig(**edge.pop("gateway", {}))
        self.lane = BatchLane(kept.open(), lane_config, gateway_config, owner)
        rules = {"max_body_bytes": 100_000} | edge
        self.edge: HttpEdge = edge_over(model, batches=self.lane.routes, **rules)

    def start(self) -> None:
        self.lane.start(self.edge.answer_line)

    @asynccontextmanager
    async def client(self, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
        transport = httpx.ASGITransport(self.edge)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            AsyncOpenAI(
                base_url="http://gateway/v1", api_key=key, http_client=http, max_retries=0
            ) as client,
        ):
            yield client


@asynccontextmanager
async def gateway_in(
    place: Kept | Path,
    model: EchoFrontend,
    owner: str = "gw-1",
    *,
    runs: bool = True,
    deadline_s: float = DEADLINE_S,
    **edge: Any,
) -> AsyncIterator[Gateway]:
    gateway = Gateway(place, model, owner, **edge)
    if runs:
        gateway.start()
    try:
        async with asyncio.timeout(deadline_s):
            yield gateway
    finally:
        await gateway.lane.close()


def chats(num_lines: int, **body: Any) -> bytes:
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "m", "messages": [{"role": "user", "content": str(number)}]} | body,
        }
        for number in range(num_lines)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: AsyncOpenAI, content: bytes) -> str:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return file.id


async def begin(client: AsyncOpenAI, content: bytes, **changes: Any) -> str:
    """Uploads a file and makes a batch of it; returns the batch's id."""
    asked = {"endpoint": CHAT, "completion_window": "24h"} | changes
    batch = await client.batches.create(input_file_id=await upload(client, content), **asked)  # type: ignore[arg-type]
    return batch.id


async def until(client: AsyncOpenAI, batch_id: str, holds: Callable[[Any], bool]) -> Any:
    """The batch, once it is so."""
    while not holds(batch := await client.batches.retrieve(batch_id)):  # noqa: ASYNC110 - as it is
        await asyncio.sleep(0.005)
    return batch


async def turn_until(holds: Callable[[], bool]) -> None:
    """Lets everything go on until it is so."""
    while not holds():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


async def ended(client: AsyncOpenAI, batch_id: str) -> Any:
    states = {"completed", "failed", "expired", "cancelled"}
    return await until(client, batch_id, lambda batch: batch.status in states)


async def records(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of answers; none of a file that there is not."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]
