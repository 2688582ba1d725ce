"""The HTTP edge of the gateway: it decides who may ask, for which model, with which request id.

Owns keys, body limits, request ids, the choice of a model's frontend, admission before a stream
starts, and `/ready`. The gateway's other own routes are in `own_routes`. Every other byte of a
response is vLLM's. Prompts and answers are never logged.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config.api_keys import KeyRecord, KeyScope
from serving.config.application import AppConfig, OpenField
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import (
    GatewayFaultError,
    MalformedRequestError,
    RequestError,
    UnknownModelError,
    WrongMethodError,
    error_body,
    error_headers,
)
from serving.domain.limits import BODY_BUDGET_BYTES, BODY_TIMEOUT_S, MAX_INPUTS, MAX_SEQUENCES
from serving.domain.models.request_fields.service_class import ServiceTier, tier_of_key
from serving.domain.usage.quotas import Quota
from serving.gateway.batches.errors import BatchesOffError
from serving.gateway.batches.records import Batch
from serving.gateway.batches.routes import BatchRoutes, LaneRequest
from serving.gateway.dispatch.admission import BodyLimits, BodyRoom, HeldBody, RequestTarget
from serving.gateway.dispatch.choice.routing import CanaryView, choose_canary
from serving.gateway.edge.api_description import DescribedModel, describe_api
from serving.gateway.edge.auth import (
    ANYBODY,
    ApiKeys,
    check_model,
    check_route,
    check_scope,
    check_tier,
    load_keys,
    may_use,
    presented_key,
)
from serving.gateway.edge.cors import allow_origin, is_preflight, preflight_headers
from serving.gateway.edge.fields import (
    REQUEST_ID,
    BodyJudge,
    asked_ttft_s,
    check_fields,
    is_large,
    judge_fields,
    passed_headers,
    read_fields,
)
from serving.gateway.edge.own_routes import GatewayReaders, ListedModel, OwnRequest, OwnRoutes
from serving.gateway.edge.readiness import Readiness
from serving.gateway.edge.routes import (
    ANTHROPIC_ROUTES,
    ENGINELESS_ROUTES,
    MODEL_METHODS,
    MODEL_ROUTES,
    NUMBERED_ROUTES,
    OWN_METHODS,
    READY,
    batch_route_of,
    methods_of,
    route_of,
)
from serving.gateway.edge.stream_errors import (
    answered_error,
    as_request_error,
    error_event,
    is_error_event,
)
from serving.gateway.forks.bodies.messages import BodyRules
from serving.gateway.forks.bodies.reader import BodyReader
from serving.gateway.forks.bodies.sizes import SHORT_BYTES
from serving.gateway.quotas.book import QuotaBook
from serving.gateway.streams.answer_head import AnswerHead
from serving.gateway.streams.connections import ClientConnection
from serving.gateway.streams.leaving import ClientLeftError, ReceiveInTurns, unless_client_leaves
from serving.gateway.streams.turns import Turns
from serving.gateway.streams.unread import UnreadAnswers, UnreadLimits
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT, EdgeMetrics
from serving.gateway.telemetry.request_story import RequestStories
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext
from serving.telemetry.spans import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

_Done = TypeVar("_Done")

# Headers that are not passed on as they came: vLLM's frontend would use the trace, or complain, or
# let every web page read the answer.
_OURS = frozenset({b"x-request-id", b"traceparent", b"tracestate", b"origin"})

# As vLLM sends it.
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class ModelFrontend(ListedModel, Protocol):
    """The interface of one served model for the edge."""

    @property
    def body_judge(self) -> BodyJudge:
        """The judge of what its engines do not honour in a body."""
        ...

    def canary(self) -> CanaryView:
        """Returns the facts that decide whether it takes a request, if it is a canary."""
        ...

    async def enter(self, target: RequestTarget) -> ASGIApp:
        """Returns vLLM's application for this request; waits for an engine if it needs one.

        Raises `RequestError` when no engine takes it in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class EdgeRules:
    """The rules of the edge. Without keys it admits all who reach it (`deployment` checks that)."""

    keys: ApiKeys
    max_body_bytes: int
    open_fields: frozenset[OpenField] = frozenset()
    max_sequences: int = MAX_SEQUENCES
    max_inputs: int = MAX_INPUTS
    cors_origins: frozenset[str] = frozenset()
    body_budget_bytes: int = BODY_BUDGET_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    unread: UnreadLimits = field(default_factory=UnreadLimits)

    @classmethod
    def of(cls, config: AppConfig) -> "EdgeRules":
        """Returns the rules of an application.

        Raises:
            ValueError: the API keys cannot be used; see `load_keys`.
        """
        gateway = config.gateway
        return cls(
            load_keys(config.auth),
            gateway.max_body_bytes,
            frozenset(gateway.open_fields),
            gateway.max_sequences,
            gateway.max_inputs,
            frozenset(gateway.cors_origins),
            gateway.body_budget_bytes,
            gateway.body_timeout_s,
            UnreadLimits(gateway.max_unread_bytes, gateway.unread_budget_bytes),
        )


class HttpEdge:
    """The gateway's ASGI application."""

    def __init__(
        self,
        models: Mapping[str, ModelFrontend],
        rules: EdgeRules,
        render_metrics: Callable[[str], Awaitable[tuple[bytes, str]]],
        describe_fleet: Callable[[], dict[str, Any]],
        ask_dashboard: Callable[[PageRequest], Awaitable[PageAnswer]],
        readiness: Callable[[], Readiness],
        tracer: Tracer = NO_TRACER,
        gateway_id: str = "",
        quotas: QuotaBook | None = None,
        batches: BatchRoutes | None = None,
    ) -> None:
        """Makes the edge; `render_metrics` gets the reader's `Accept` header.

        Without `batches` the routes of the batch lane refuse.
        """
        self._models = models
        self._rules = rules
        self._tracer = tracer
        self._room = BodyRoom(
            BodyLimits(rules.max_body_bytes, rules.body_budget_bytes, rules.body_timeout_s)
        )
        self._unread: UnreadAnswers[ClientConnection] = UnreadAnswers(rules.unread)
        self._bodies = BodyReader()
        self._turns, self._leaving = Turns(), Turns()
        self._stories = RequestStories()
        self._quotas = quotas or QuotaBook(gateway_id)
        readers = GatewayReaders(
            render_metrics,
            describe_fleet,
            ask_dashboard,
            self._describe,
            self._stories.describe,
            gateway_id,
        )
        self._own = OwnRoutes(models, readers)
        self._batches = batches
        self._readiness = readiness
        self.metrics = EdgeMetrics()

    @property
    def broken_models(self) -> list[str]:
        """The models that this gateway cannot answer for any more. It has to be replaced."""
        return self._own.broken_models

    @property
    def tenant_quotas(self) -> dict[str, tuple[Quota, ...]]:
        """The quotas of each tenant that has some."""
        return self._rules.keys.quotas

    def close(self) -> None:
        """Ends the process that reads large bodies. Idempotent."""
        self._bodies.close()

    @property
    def num_body_bytes(self) -> int:
        """The bytes of the bodies of all requests in flight."""
        return self._room.num_held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; refuses anything that is not HTTP."""
        if scope["type"] == "lifespan":
            await _serve_lifespan(receive, send)
        elif scope["type"] == "http" and _path_of(scope) == READY:
            await self._answer_ready(scope["method"])(scope, receive, send)
        elif scope["type"] == "http":
            client = ReceiveInTurns(receive, self._leaving)
            exchange = _Exchange(scope, client, send, self.metrics)
            if self._tracer.is_on and exchange.path in MODEL_ROUTES:
                exchange.begin_trace(self._tracer)
            await exchange.run(self._serve)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def answer_line(self, scope: Scope, receive: Receive, send: Send, batch: Batch) -> None:
        """Serves one line of a batch as a request of the key that made the batch, in its class."""

        async def serve(exchange: "_Exchange") -> None:
            await self._turns.wait()
            exchange.context.tenant = batch.tenant
            exchange.context.batch_id = batch.batch_id
            holder = self._rules.keys.check_later(batch.key, batch.tenant, time.time())
            exchange.context.weight = holder.weight
            check_route(holder, exchange.path)
            await self._serve_model(exchange, holder, ServiceTier.FLEX)

        client = ReceiveInTurns(receive, self._leaving)
        exchange = _Exchange(scope, client, send, self.metrics)
        if self._tracer.is_on:
            exchange.begin_trace(self._tracer)
        await exchange.run(serve)

    def _answer_ready(self, method: str) -> Response:
        if method not in OWN_METHODS:
            error = WrongMethodError(method, READY, OWN_METHODS)
            return PlainTextResponse(f"{error.message}\n", error.status, error_headers(error))
        ready = self._readiness()
        return PlainTextResponse(f"{ready.reason}\n", 200 if ready.is_ready else 503)

    async def _serve(self, exchange: "_Exchange") -> None:
        if self._rules.cors_origins and await self._share(exchange):
            return
        if exchange.path in MODEL_ROUTES:
            await self._turns.wait()
            holder = self._authorize(exchange)
            if exchange.method not in MODEL_METHODS:
                raise WrongMethodError(exchange.method, exchange.path, MODEL_METHODS)
            check_route(holder, exchange.path)
            await self._serve_model(exchange, holder)
            return
        if batch_route_of(exchange.path)[0]:
            holder = self._authorize(exchange)
            check_scope(holder, KeyScope.INFERENCE)
            await exchange.serve_batches(self._batches, holder)
            return
        asked = OwnRequest(
            exchange.method,
            exchange.path,
            exchange.scope.get("query_string", b"").decode("latin-1"),
            exchange.header(b"accept"),
            exchange.header(b"if-none-match"),
        )
        holder = ANYBODY if asked.is_open else self._authorize(exchange)
        await exchange.respond(await self._own.answer(asked, holder))

    def _describe(self, holder: KeyRecord) -> dict[str, Any]:
        models = (
            DescribedModel((model.name, *model.adapter_names), model.served_routes)
            for model in self._models.values()
            if model.canary_of is None
        )
        rules = self._rules
        opened = rules.open_fields | holder.open_fields
        return describe_api(
            models,
            holder,
            opened,
            needs_key=bool(rules.keys),
            has_batches=self._batches is not None,
        )

    async def _share(self, exchange: "_Exchange") -> bool:
        """Lets allowed web pages read the answer; returns whether it has been given already.

        A preflight is answered before a key is looked for: browsers send none with it.
        """
        headers = exchange.scope["headers"]
        answer = allow_origin(headers, self._rules.cors_origins)
        exchange.add_headers(answer.headers)
        if not is_preflight(exchange.method, headers):
            return False
        route = route_of(exchange.path)
        if answer.refusal is not None:
            await exchange.respond(PlainTextResponse(f"{answer.refusal}\n", 403))
        elif route is None:
            await exchange.respond(PlainTextResponse("there is no such route\n", 404))
        else:
            await exchange.respond(Response(None, 204, preflight_headers(methods_of(route))))
        return True

    def _authorize(self, exchange: "_Exchange") -> KeyRecord:
        """Returns what the request's key may do, and puts the request on its tenant's account."""
        holder = self._rules.keys.check(presented_key(exchange.scope["headers"]), time.time())
        exchange.context.tenant = holder.tenant or DEFAULT_TENANT
        exchange.context.weight = holder.weight
        return holder

    async def _serve_model(
        self, exchange: "_Exchange", holder: KeyRecord, tier: ServiceTier | None = None
    ) -> None:
        """Serves a request for a model, in the class of `tier` if one is given."""
        body = await exchange.read_body(self._room)
        exchange.context.body_read()
        opened = self._rules.open_fields | holder.open_fields
        exchange.context.open_fields = opened
        limits = BodyRules(opened, self._rules.max_sequences, self._rules.max_inputs)
        fields = None if is_large(exchange.path, body) else read_fields(body)
        if fields is None:
            judged = await exchange.unless_left(self._bodies.read(exchange.path, body, limits))
        else:
            judged = judge_fields(exchange.path, fields, limits)
        tier = tier or judged.service_tier or tier_of_key(holder.service_tiers)
        check_tier(holder, tier)
        exchange.context.service_tier = tier
        exchange.context.patience_s = asked_ttft_s(exchange.scope["headers"])
        target = RequestTarget(
            judged.model,
            judged.user_id or exchange.context.request_id,
            needs_engine=exchange.path not in ENGINELESS_ROUTES,
            is_prepared_apart=fields is None or judged.has_own_template,
            service_class=tier.service_class,
            patience_s=exchange.context.patience_s,
        )
        exchange.context.is_short = len(body) <= SHORT_BYTES and not target.is_prepared_apart
        frontend = self._select(target, holder)
        self._stories.begin(exchange.context.selected(frontend.name))
        names = (frontend.name,) if target.name is None else (frontend.name, target.name)
        exchange.count(self._quotas, holder, names)
        # Of a large one, what is left of it is looked at.
        if target.needs_engine and fields is not None:
            check_fields(fields, frontend.body_judge, exchange.path)
        headers = passed_headers(exchange.scope["headers"], opened)
        if judged.is_stream:
            exchange.expect_stream()
        app = await exchange.unless_left(frontend.enter(target))
        exchange.context.admitted()
        exchange.connect(self._unread)
        await exchange.delegate(app, body, headers)

    def _select(self, target: RequestTarget, holder: KeyRecord) -> ModelFrontend:
        """Returns the requested model, or its canary in its place.

        Which of the two it is makes no difference to what the key has to be for.
        """
        frontend = self._named(target.name, holder)
        models = self._models.values()
        canaries = (model for model in models if model.canary_of == frontend.name)
        canary = next(canaries, None)
        if canary is None:
            return frontend
        is_adapter = target.name is not None and target.name != frontend.name
        if is_adapter and target.name not in canary.adapter_names:
            return frontend
        return canary if choose_canary(target.key, canary.canary()).is_taken else frontend

    def _named(self, name: str | None, holder: KeyRecord) -> ModelFrontend:
        served = [model for model in self._models.values() if model.canary_of is None]
        if name is None:
            if len(served) == 1 and may_use(holder, served[0].name):
                return served[0]
            names = ", ".join(_allowed_names(served, holder)) or "none"
            raise MalformedRequestError(f"No model is named. Allowed: {names}.", param="model")
        check_model(holder, name)
        if name in self._models:  # a canary too, by its own name
            return self._models[name]
        for frontend in served:
            if name in frontend.adapter_names:
                return frontend
        raise UnknownModelError(name, _allowed_names(served, holder))


def _allowed_names(models: Iterable[ModelFrontend], holder: KeyRecord) -> list[str]:
    """Returns the names of models and adapters that the holder of a key may use."""
    names = (name for model in models for name in (model.name, *model.adapter_names))
    return sorted(name for name in names if may_use(holder, name))


class _Exchange:
    """Tracks one HTTP request and its response: request id, status, and the form of errors."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, metrics: EdgeMetrics) -> None:
        self.scope = scope
        self.path = _path_of(scope)
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

    async def run(self, serve: Callable[["_Exchange"], Awaitable[None]]) -> None:
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


def _path_of(scope: Scope) -> str:
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


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
