"""One HTTP request of the gateway and its answer: request id, status, and the form of errors.

Owns what happens to an answer on its way to the client: headers of ours, a stream's head in time,
errors in the form of the route's API, and how it ended. Does not own what is decided about the
request (`http`).
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config.api_keys import KeyRecord
from serving.domain.errors import (
    GatewayFaultError,
    RequestError,
    error_body,
    error_headers,
)
from serving.gateway.batches.errors import BatchesOffError
from serving.gateway.batches.routes import BatchRoutes, LaneRequest
from serving.gateway.dispatch.admission import BodyRoom, HeldBody
from serving.gateway.edge.answers.stream_errors import (
    answered_error,
    as_request_error,
    error_event,
    is_error_event,
)
from serving.gateway.edge.fields import REQUEST_ID
from serving.gateway.edge.routes import (
    ANTHROPIC_ROUTES,
    MODEL_ROUTES,
    NUMBERED_ROUTES,
    route_of,
)
from serving.gateway.quotas.book import QuotaBook
from serving.gateway.streams.answer_head import AnswerHead
from serving.gateway.streams.connections import ClientConnection
from serving.gateway.streams.leaving import ClientLeftError, unless_client_leaves
from serving.gateway.streams.unread import UnreadAnswers
from serving.gateway.telemetry.request_metrics import EdgeMetrics
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext
from serving.telemetry.spans import Tracer

logger = logging.getLogger(__name__)

_Done = TypeVar("_Done")

# Headers that are not passed on as they came: vLLM's frontend would use the trace, or complain, or
# let every web page read the answer.
_OURS = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"origin"})

# As vLLM sends it.
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class HttpExchange:
    """Tracks one HTTP request and its response: request id, status, and the form of errors."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, metrics: EdgeMetrics) -> None:
        self.scope = scope
        self.path = path_of(scope)
        self._receive = receive
        self._send = send
        self._status: int | None = None
        # How it ended: the last of the answer was handed over, or the client left, or we failed.
        self._is_whole = self._has_left = self._has_failed = False
        self._is_replaced = self._is_stream = False
        self._sent = b""  # of a stream whose events are numbered: the last of it
        # The status of what a stream that had no output ended with, and what was answered in place
        # of one whose head had gone: its status and its body.
        self._told_status: int | None = None
        self._unstreamed: tuple[int, bytearray] | None = None
        taken = _taken_request_id(scope)
        request_id = taken or uuid.uuid4().hex
        self._body: HeldBody | None = None  # until it is read
        # Serve gives every request an id and puts it on the response itself; only an id that we had
        # to make (none came, or not a fit one) is ours to add.
        self._own_headers = [] if taken else [(b"x-request-id", request_id.encode())]
        self.context = RequestContext(time.monotonic(), request_id, self.path, edge=metrics)

    def begin_trace(self, tracer: Tracer) -> None:
        """Begins its trace, or continues the client's, if it is sampled."""
        traceparent, tracestate = self.header(b"traceparent"), self.header(b"tracestate")
        self.context.begin_trace(tracer, self.method, traceparent, tracestate)

    @property
    def method(self) -> str:
        """The HTTP method: GET, POST and so on."""
        return str(self.scope["method"])

    def header(self, name: bytes) -> str:
        """Returns a header's values as one list; empty when it did not come."""
        values = (value.decode("latin-1") for key, value in self.scope["headers"] if key == name)
        return ", ".join(values)

    async def run(self, serve: Callable[["HttpExchange"], Awaitable[None]]) -> None:
        """Has `serve` answer the request; whatever it raises becomes the answer."""
        REQUEST_CONTEXT.set(self.context)
        try:
            await serve(self)
        except ClientLeftError:
            self._has_left = True
        except RequestError as error:
            if self._status is not None:
                raise
            self.context.refused(error)
            await self._respond_error(error)
        except Exception:
            self._has_failed = True
            if self._was_begun:
                await self._end_stream(GatewayFaultError())
            raise
        finally:
            if self._body is not None:
                self._body.give_back()
            if self.context.head is not None:
                self.context.head.close()
            if self._was_begun:
                self._status = 200
            if self.context.connection is not None:
                self.context.connection.caught_up()
            self.context.ended(
                time.monotonic(),
                _label(self.path),
                self._status,
                told_status=self._told_status,
                is_whole=self._is_whole,
                # The client left before it had the whole answer; known at the end.
                is_cancelled=self._has_left or not (self._is_whole or self._has_failed),
            )

    async def unless_left(self, work: Coroutine[Any, Any, _Done]) -> _Done:
        """Returns what comes of work that may wait; a client that leaves meanwhile ends it."""
        return await unless_client_leaves(self._receive, work)

    def connect(self, unread: UnreadAnswers[ClientConnection]) -> None:
        """Lets the answer be written past the application, and counts what is not read of it."""
        self.context.connection = ClientConnection.below(
            self._receive, unread, self.context.request_id
        )

    def count(self, quotas: QuotaBook, holder: KeyRecord, names: tuple[str, ...]) -> None:
        """Counts the request under its tenant's quotas, and says in headers what is left.

        Raises:
            QuotaExceededError: they are used up.
        """
        if not holder.quotas:
            return
        decision = quotas.admit(self.context.tenant, holder.quotas, names, time.time())
        self.add_headers(decision.headers)
        if decision.error is not None:
            raise decision.error
        self.context.quota = decision.ticket

    def expect_stream(self) -> None:
        """Has a stream begun in time, also while the request waits for an engine.

        All headers that are known only with the request have to be there.
        """
        headers = [_EVENT_STREAM, *self._own_headers]
        self.context.head = AnswerHead(self._send)
        self.context.head.hold({"type": "http.response.start", "status": 200, "headers": headers})

    @property
    def _was_begun(self) -> bool:
        """True if the head of a stream has gone, and nothing has answered yet."""
        head = self.context.head
        return head is not None and head.was_sent and self._status is None

    def add_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Adds headers to whatever will be answered."""
        self._own_headers += headers

    async def serve_batches(self, batches: BatchRoutes | None, holder: KeyRecord) -> None:
        """Answers a request for a route of the batch lane."""
        if batches is None:
            await self._respond_error(BatchesOffError())
            return
        asked = LaneRequest(
            self.method,
            self.path,
            self.scope.get("query_string", b"").decode("latin-1"),
            self.header(b"content-type"),
            self.header(b"range"),
            self._receive,
        )
        await self.respond(await batches.answer(asked, holder))

    async def respond(self, response: Response) -> None:
        """Answers with this, and with the headers that all answers have."""
        await response(self.scope, self._receive, self._send_with_headers)

    async def delegate(
        self, app: ASGIApp, body: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        """Hands the request over, its body already read, as if it had just arrived."""
        scope = dict(self.scope, root_path="", path=self.path)
        scope["headers"] = [
            *((name, value) for name, value in headers if name not in _OURS),
            (b"x-request-id", self.context.request_id.encode()),
        ]
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            message = await self._receive()
            # vLLM answers a client that has left, too: with nothing, and status 200.
            self._has_left |= message["type"] == "http.disconnect" and not self._is_whole
            return message

        try:
            await app(scope, receive, self._send_with_headers)
        except Exception as fault:
            if not self._is_stream or self._is_whole:
                raise
            # The type alone: a message may hold what the client sent.
            cause = type(fault.__cause__ or fault).__name__
            error = self.context.failure or self.context.refusal or as_request_error(fault)
            self.context.failure = None  # told by what follows
            logger.warning("stream_failed route=%s cause=%s code=%s", self.path, cause, error.code)
            if self._has_held_head:
                self._answer_instead(error)
                await self._answer_replaced()
                return
            await self._end_stream(error)
        await self._answer_replaced()

    async def _answer_replaced(self) -> None:
        """Answers with our error, where vLLM's answer was kept back for it."""
        if self._is_replaced and self.context.failure is not None:
            error, self.context.failure = self.context.failure, None
            await self._respond_error(error)

    def _told_error(self, body: bytes) -> RequestError | None:
        """Returns our error that a part of a stream reports; `None` if it reports none."""
        failure = self.context.failure
        if failure is None and (self.path in ANTHROPIC_ROUTES or self._has_held_head):
            # vLLM makes a fault of its own of every error of the chat below `/v1/messages`.
            failure = self.context.refusal
        is_told = failure is not None and self._is_stream and is_error_event(body)
        return failure if is_told else None

    @property
    def _has_held_head(self) -> bool:
        return self.context.head is not None and self.context.head.is_held

    def _answer_instead(self, error: RequestError) -> None:
        """Has the request answered with an error in place of a stream that has not been begun."""
        if self.context.head is not None:
            self.context.head.drop()
        self._status = None
        self._is_stream, self._is_replaced = False, True
        self.context.failure = error

    async def _respond_error(self, error: RequestError) -> None:
        """Answers with an error, or tells it in the stream that has been begun for the request."""
        if self._was_begun:
            await self._end_stream(error)
            return
        if self.context.head is not None:
            self.context.head.drop()
        body = error_body(error, self.path)
        response = JSONResponse(body, status_code=error.status, headers=error_headers(error))
        await self.respond(response)

    async def _end_stream(self, error: RequestError) -> None:
        """Tells an error as the last event of a stream whose head has gone, or goes with it."""
        self._status, self._is_stream = 200, True
        self._is_whole, self._is_replaced = True, False
        self._note_told(error)
        body = error_event(error, self.path, self._sent)
        await self._send_with_head({"type": "http.response.body", "body": body})

    def _note_told(self, error: RequestError) -> None:
        if not self.context.has_begun:
            self._told_status = error.status

    async def read_body(self, room: BodyRoom) -> bytes:
        """Returns the whole body, which is held until the request ends; see `HeldBody.read`."""
        self._body = room.hold()
        return await self._body.read(self._receive, self.scope["headers"])

    async def _send_with_headers(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start:
            # vLLM writes our errors in its own form, without their codes and without `Retry-After`.
            self._is_replaced = message["status"] >= 400 and self.context.failure is not None
        if self._is_replaced:
            return
        if is_start and self._was_begun:
            self._follow_head(message)
            return
        if is_start:
            self._status = message["status"]
            self._is_stream = _is_event_stream(message)
            headers = [*message.get("headers", []), *self._own_headers]
            message = {**message, "headers": headers}
            if self._is_stream:
                self.context.head = self.context.head or AnswerHead(self._send)
                self.context.head.hold(message)
                return
            if self.context.head is not None:
                self.context.head.drop()
        elif message["type"] == "http.response.body":
            if self._unstreamed is not None:
                await self._take_unstreamed(message)
                return
            if self._is_stream:
                await self._send_of_stream(message)
                return
            self.context.answers()
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    def _follow_head(self, start: Message) -> None:
        """Notes what an application answers behind the head that has gone in place of its own."""
        self._status, self._is_stream = 200, True
        if start["status"] != 200 or not _is_event_stream(start):
            self._unstreamed = start["status"], bytearray()

    async def _take_unstreamed(self, message: Message) -> None:
        """Takes in an answer that is no stream; whole, it ends the stream that was begun."""
        assert self._unstreamed is not None
        status, body = self._unstreamed
        body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._end_stream(answered_error(status, bytes(body)))

    async def _send_of_stream(self, message: Message) -> None:
        """Sends a part of a stream; what comes before the first output waits with the head.

        vLLM's report of our error becomes ours: an answer of its own as long as nothing was sent.
        """
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        head = self.context.head
        assert head is not None
        if (error := self._told_error(body)) is not None:
            if head.is_held:
                self._answer_instead(error)
                return
            message = {**message, "body": error_event(error, self.path)}
            self.context.failure = None  # told
            self._note_told(error)
        elif body and self.path in NUMBERED_ROUTES:
            self._sent = body
        self._is_whole = is_last
        if head.has_part:
            if head.is_held and not (is_last or self.context.has_begun):
                head.keep(message)
                return
            await self._send_with_head(message)
            if not (is_last or self.context.has_begun):
                head.stands_still()
            return
        self.context.answers()
        await self._send(message)

    async def _send_with_head(self, message: Message) -> None:
        """Sends the head of a stream, or what else waits in it, and a part behind it."""
        head, connection = self.context.head, self.context.connection
        assert head is not None
        if connection is not None:
            connection.keep()
        try:
            await head.release()
            self.context.answers()
            await self._send(message)
        finally:
            if connection is not None:
                connection.flush()


def _is_event_stream(start: Message) -> bool:
    headers = start.get("headers", [])
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def path_of(scope: Scope) -> str:
    """Returns the path, without that below which the gateway is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _label(path: str) -> str:
    """Returns the route of a path: a client may not choose a label's value."""
    return path if path in MODEL_ROUTES else route_of(path) or "other"


def _taken_request_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value.decode("latin-1"))
            if REQUEST_ID.fullmatch(text):
                return text
    return None
