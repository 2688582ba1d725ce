"""The way of a batch's line to its route: a request within this process, past keys and sockets.

Owns the shape of that request. Does not own what it may ask for: the edge judges it by the key that
made the batch, as it judges any.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from serving.domain.errors import GatewayFaultError, openai_error_body
from serving.gateway.batches.answers import LineReply
from serving.gateway.batches.lines import BatchLine
from serving.gateway.batches.records import Batch

logger = logging.getLogger(__name__)

AnswerLine = Callable[[Scope, Receive, Send, Batch], Coroutine[Any, Any, None]]


class EdgeCaller:
    """Asks the edge of this gateway. Implements `LineCaller`."""

    def __init__(self, answer_line: AnswerLine) -> None:
        """Takes the edge's own entry for lines of batches."""
        self._answer_line = answer_line

    async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
        """Returns what the route answers; to a fault of ours, status 500."""
        request_id = f"{batch.batch_id}-{line.number}"
        exchange = _LineExchange(line.body)
        # A task of its own, because what a request is about is kept by task.
        scope = _scope(batch.endpoint, request_id, len(line.body))
        try:
            await asyncio.create_task(
                self._answer_line(scope, exchange.receive, exchange.send, batch)
            )
        except Exception as fault:  # noqa: BLE001 - whatever it is, the other lines go on
            # The type alone: a message may hold what the client sent.
            cause = type(fault.__cause__ or fault).__name__
            logger.error("batch_line_failed request=%s cause=%s", request_id, cause)
            return _fault(request_id)
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            # It goes to the request first, which may have answered it in place of ending.
            raise asyncio.CancelledError
        return exchange.reply(request_id)


class _LineExchange:
    """The messages of one request."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._retry_after_s: float | None = None
        self._is_final = False
        self._parts: list[bytes] = []
        self._never = asyncio.Event()

    async def receive(self) -> Message:
        """Returns the body; then nothing comes any more, and nobody leaves."""
        if self._body is None:
            await self._never.wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Takes a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            for name, value in message.get("headers", ()):
                if name.lower() == b"retry-after" and value.isdigit():
                    self._retry_after_s = float(value)
                self._is_final |= (name.lower(), value) == (b"x-should-retry", b"false")
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))

    def reply(self, request_id: str) -> LineReply:
        """Returns the answer that came."""
        body = b"".join(self._parts)
        return LineReply(self._status, body, request_id, self._retry_after_s, self._is_final)


def _fault(request_id: str) -> LineReply:
    error = GatewayFaultError()
    return LineReply(error.status, msgspec.json.encode(openai_error_body(error)), request_id)


def _scope(path: str, request_id: str, num_bytes: int) -> Scope:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(num_bytes).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
