"""A gateway's edge at a real HTTP server, and a client that shows an answer part by part."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.gateway.edge.http import HttpEdge

_SOCKET_BYTES = 8192


@asynccontextmanager
async def http_server(
    edge: HttpEdge, protocol: type[asyncio.Protocol] = HttpToolsProtocol
) -> AsyncIterator[int]:
    """Serves `edge` as Serve does, by uvicorn; yields the port."""
    listener = socket.socket()
    # Inherited by its connections: a client that does not read is felt soon.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(edge, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


class HttpStream:
    """A streamed answer as it comes over HTTP: the bodies of its chunks."""

    def __init__(self, port: int, path: str, body: dict[str, Any], key: str = "none") -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.came = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.task = asyncio.ensure_future(self._run(port, path, json.dumps(body).encode(), key))

    async def _run(self, port: int, path: str, body: bytes, key: str) -> None:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        own.settimeout(0)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=own, limit=_SOCKET_BYTES)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        # In every event: a long one fills buffers soon.
        head += f"x-request-id: {id(self):0>120}\r\nauthorization: Bearer {key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            answer = await reader.readuntil(b"\r\n\r\n")
            self.status = int(answer.split()[1])
            lines = answer.decode().splitlines()[1:-1]
            self.headers = dict(line.lower().split(": ", 1) for line in lines)
            assert b"transfer-encoding: chunked" in answer, answer
            while size := int(await reader.readuntil(b"\n"), 16):
                self.parts.append(await reader.readexactly(size))
                await reader.readexactly(2)
                self.came.set()
                await self.may_read.wait()
        finally:
            writer.close()

    @property
    def text(self) -> str:
        """The text of its one answer so far."""
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        return "".join(
            choice.get("delta", choice).get("content") or choice.get("text") or ""
            for choice in choices
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        """What its events carry, `[DONE]` left out."""
        return events_in(self.parts)


def events_in(parts: list[bytes]) -> list[dict[str, Any]]:
    """What the events in the parts of a stream carry, `[DONE]` left out."""
    lines = b"".join(parts).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def without_names(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same events without what differs between two equal requests."""
    return [{**event, "id": "", "created": 0} for event in events]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What is left of events however their text was divided, by the answer's index.

    The whole text of an answer and its token ids, the fields of events that carry them, and all
    other events.
    """
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    forms: set[tuple[int, str]] = set()
    others: list[tuple[int, str]] = []
    for event in without_names(events):
        choices = event.get("choices", [])
        if len(choices) != 1:
            others.append((-1, json.dumps(event, sort_keys=True)))
            continue
        choice = choices[0]
        index = choice["index"]
        holder, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        texts[index] = texts.get(index, "") + (holder.get(name) or "")
        if choice.get("token_ids") is not None:
            token_ids[index] = token_ids.get(index, []) + choice["token_ids"]
            choice["token_ids"] = []
        is_middle = choice["finish_reason"] is None and "role" not in holder
        if name in holder or not is_middle:
            # Of an end, vLLM leaves the field out if a parser had no text for it.
            holder[name] = ""
        if is_middle and event.get("usage"):
            # How far the answer has come depends on where it is divided.
            event["usage"] |= {"completion_tokens": 0, "total_tokens": 0}
        form = (index, json.dumps(event, sort_keys=True))
        if is_middle:
            forms.add(form)
        else:
            others.append(form)
    return {
        "texts": texts,
        "token_ids": token_ids,
        "forms": sorted(forms),
        "others": sorted(others),
    }
