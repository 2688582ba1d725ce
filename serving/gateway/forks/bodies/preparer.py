"""Does what vLLM does with a request before an engine gets it: a task of a fork server.

vLLM's own frontend runs in the fork, on a body as the client sent it, until it asks an engine for
tokens or has answered without. What it rendered until then is told to the gateway.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Collection
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from serving.gateway.edge.media import name_apart
from serving.gateway.edge.routes import GENERATE_ROUTES
from serving.gateway.forks.bodies.exchange import told
from serving.gateway.forks.bodies.messages import Answered, Prepared, PrepareOrder
from serving.gateway.forks.bodies.replay import encoded, note_renders
from serving.gateway.forks.bodies.slim import check_values, slim_body
from serving.gateway.frontend import FleetLLM


class PreparingLLM(FleetLLM):
    """Has no engine. Notes that one was asked, and answers nothing."""

    asked: asyncio.Event

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Notes it."""
        del args, kwargs
        self.asked.set()
        return _nothing()

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Notes it."""
        del args, kwargs
        self.asked.set()
        return _nothing()


async def _nothing() -> AsyncGenerator[Any, None]:
    await asyncio.get_running_loop().create_future()
    yield


class Preparer:
    """Prepares requests for one version of a model. Built once, used in forks."""

    def __init__(self, llm: PreparingLLM, app: ASGIApp) -> None:
        self._llm = llm
        self._app = app
        self._renders: list[Any] = []
        note_renders(llm.renderer, self._renders)

    def outcome_of(self, payload: bytes) -> bytes:
        """Does an order: `payload` is a `PrepareOrder`.

        Raises:
            MemoryError: it takes more than it may.
        """
        order = msgspec.msgpack.decode(payload, type=PrepareOrder)
        # Every fork counts its media from where the program stands.
        name_apart(self._llm.renderer)
        return told(lambda: asyncio.run(self._prepared(order)))

    async def _prepared(self, order: PrepareOrder) -> Answered | Prepared:
        self._llm.asked = asyncio.Event()
        answer: list[Message] = []

        async def send(message: Message) -> None:
            answer.append(message)

        serving = asyncio.create_task(_serve(self._app, order, send))
        asked = asyncio.create_task(self._llm.asked.wait())
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not self._llm.asked.is_set():
            await serving  # whatever it raises is told
            return _answered(answer)
        fields = json.loads(order.body)
        if not self._renders or order.path not in GENERATE_ROUTES:
            check_values(fields)
            return Prepared(None, [])
        return Prepared(slim_body(order.path, fields), [encoded(each) for each in self._renders])


async def _serve(app: ASGIApp, order: PrepareOrder, send: Any) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": order.path,
        "raw_path": order.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": order.headers,
        "client": None,
        "server": None,
        "state": {},
    }
    pending: list[Message] = [{"type": "http.request", "body": order.body, "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await asyncio.get_running_loop().create_future()
        return pending.pop()

    await app(scope, receive, send)


def _answered(answer: list[Message]) -> Answered:
    start, *parts = answer
    body = b"".join(part.get("body", b"") for part in parts)
    if start["status"] >= 400 and b'"message":""' in body:
        # vLLM catches what a template raises, and this is what a `MemoryError` says.
        raise MemoryError
    return Answered(start["status"], list(start.get("headers", [])), body)


def no_engines(supported_tasks: Collection[str]) -> Any:
    """Returns a client in place of `FleetEngineClient`, with no engine at all."""

    async def get_supported_tasks_async() -> tuple[str, ...]:
        return tuple(supported_tasks)

    return SimpleNamespace(
        dispatcher=None,
        engine_ranks_managed=(0,),
        resources=SimpleNamespace(engine_dead=False),
        supported_tasks=tuple(supported_tasks),
        get_supported_tasks_async=get_supported_tasks_async,
        set_failure_sink=lambda _sink: None,
        shutdown=lambda timeout=None: None,  # noqa: ARG005 - vLLM's signature
    )
