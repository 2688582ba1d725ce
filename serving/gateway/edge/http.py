"""The HTTP edge of the gateway: it decides who may ask, for which model, with which request id.

Owns keys, body limits, request ids, the choice of a model's frontend, admission before a stream
starts, and the gateway's own routes (`/health`, `/ready`, `/v1/models`, `/metrics`, `/fleet`).
Every other byte of a response is vLLM's. Prompts and answers are never logged.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config.application import AppConfig, OpenField
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import (
    DashboardUnavailableError,
    MalformedRequestError,
    RequestError,
    RequestTooLargeError,
    UnknownModelError,
    error_body,
    error_headers,
    openai_error_body,
)
from serving.domain.limits import MAX_INPUTS, MAX_SEQUENCES
from serving.gateway.admission import RequestTarget
from serving.gateway.edge.auth import ApiKeys, load_keys, presented_key
from serving.gateway.edge.fields import (
    REQUEST_ID,
    RequestFields,
    check_fields,
    check_inputs,
    check_open_arguments,
    check_request_id,
    check_sequences,
    check_shapes,
    check_steering,
    passed_headers,
    read_fields,
)
from serving.gateway.edge.readiness import Readiness
from serving.gateway.edge.stream_errors import as_request_error, error_event, is_error_event
from serving.gateway.reports.fleet_pages import is_static_page
from serving.gateway.routing import CanaryView, choose_canary
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT, EdgeMetrics
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext
from serving.telemetry.spans import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

# What a model's frontend serves to clients. vLLM registers more (scaling, adapters, profiling),
# which are operations on a server of its own and not for whoever holds an API key.
_MODEL_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/rerank",
        "/classify",
        "/pooling",
        "/tokenize",
        "/detokenize",
    }
)

_GENERATE_ROUTES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)

# Routes whose streams number their events.
_NUMBERED_ROUTES = frozenset({"/v1/responses"})

# Routes of `_MODEL_ROUTES` that no engine is needed for.
_ENGINELESS_ROUTES = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})

_OWN_ROUTES = frozenset({"/health", "/v1/models", "/metrics", "/fleet", "/fleet/history"})

# Asked by every load balancer and kubelet every few seconds, so it is neither counted nor logged.
_READY_ROUTE = "/ready"

# The same address gives people the dashboard's page. What was read with a key stays in no cache.
_FLEET_HEADERS = {
    "content-type": "application/json",
    "vary": "Accept",
    "cache-control": "no-store",
}

# Headers that are not passed on as they came: vLLM's frontend would use the trace, or complain.
_OURS = frozenset({b"x-request-id", b"traceparent", b"tracestate"})


class ModelFrontend(Protocol):
    """The interface of one served model for the edge."""

    @property
    def name(self) -> str:
        """The `model` field that selects it."""
        ...

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that select it too."""
        ...

    @property
    def refused_fields(self) -> Mapping[str, str]:
        """The fields of a request that its engines cannot honour, with the reason."""
        ...

    @property
    def is_broken(self) -> bool:
        """True if it answers nothing any more and does not recover."""
        ...

    @property
    def canary_of(self) -> str | None:
        """The model whose requests it takes a share of; `None` for most models."""
        ...

    def canary(self) -> CanaryView:
        """Returns the facts that decide whether it takes a request, if it is a canary."""
        ...

    async def enter(self, target: RequestTarget) -> ASGIApp:
        """Returns vLLM's application for this request; waits for an engine if it needs one.

        Raises `RequestError` when no engine takes it in time.
        """
        ...

    async def cards(self) -> list[dict[str, Any]]:
        """Returns its entries of `/v1/models`."""
        ...


@dataclass(frozen=True, slots=True)
class EdgeRules:
    """The rules of the edge. Without keys it admits all who reach it (`deployment` checks that)."""

    keys: ApiKeys
    max_body_bytes: int
    open_fields: frozenset[OpenField] = frozenset()
    max_sequences: int = MAX_SEQUENCES
    max_inputs: int = MAX_INPUTS

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
    ) -> None:
        """Makes the edge; `render_metrics` gets the reader's `Accept` header."""
        self._models = models
        self._rules = rules
        self._tracer = tracer
        self._render_metrics = render_metrics
        self._describe_fleet = describe_fleet
        self._ask_dashboard = ask_dashboard
        self._readiness = readiness
        self.metrics = EdgeMetrics()

    @property
    def broken_models(self) -> list[str]:
        """The models that this gateway cannot answer for any more. It has to be replaced."""
        return sorted(name for name, model in self._models.items() if model.is_broken)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; refuses anything that is not HTTP."""
        if scope["type"] == "lifespan":
            await _serve_lifespan(receive, send)
        elif scope["type"] == "http" and _path_of(scope) == _READY_ROUTE:
            ready = self._readiness()
            status = 200 if ready.is_ready else 503
            await PlainTextResponse(f"{ready.reason}\n", status)(scope, receive, send)
        elif scope["type"] == "http":
            exchange = _Exchange(scope, receive, send, self.metrics)
            if self._tracer.is_on and exchange.path in _MODEL_ROUTES:
                exchange.begin_trace(self._tracer)
            await exchange.run(self._serve)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, exchange: "_Exchange") -> None:
        path = exchange.path
        if path in _MODEL_ROUTES:
            exchange.context.tenant = self._authorize(exchange.scope)
            await self._serve_model(exchange)
        else:
            await self._serve_own(exchange, path)

    async def _serve_own(self, exchange: "_Exchange", path: str) -> None:
        """Serves a route that is the gateway's own; the page and `/health` need no key."""
        if path == "/health":
            broken = self.broken_models
            text = f"{complaint(broken)}\n" if broken else ""
            await exchange.respond(PlainTextResponse(text, 503 if broken else 200))
            return
        if path.startswith("/fleet") and is_static_page(
            exchange.method, path, exchange.header(b"accept")
        ):
            await self._serve_page(exchange)
            return
        exchange.context.tenant = self._authorize(exchange.scope)
        if path == "/v1/models":
            await exchange.respond(JSONResponse(await self._model_list()))
        elif path == "/metrics":
            body, content_type = await self._render_metrics(exchange.header(b"accept"))
            await exchange.respond(Response(body, media_type=content_type))
        elif path == "/fleet":
            # One loop serves this and every stream: a large fleet's answer has to be encoded fast.
            body = msgspec.json.encode(self._describe_fleet())
            await exchange.respond(Response(body, headers=_FLEET_HEADERS))
        elif path == "/fleet/history":
            await self._serve_page(exchange)
        else:
            error = MalformedRequestError(f"There is no route {path}.", code="not_found")
            await exchange.respond(JSONResponse(openai_error_body(error), status_code=404))

    def _authorize(self, scope: Scope) -> str:
        return self._rules.keys.check(presented_key(scope["headers"])) or DEFAULT_TENANT

    async def _serve_page(self, exchange: "_Exchange") -> None:
        """Passes on the dashboard's answer, or the reason why there is none."""
        query = exchange.scope["query_string"].decode("latin-1")
        request = PageRequest(exchange.path, query, exchange.header(b"if-none-match"))
        try:
            answer = await self._ask_dashboard(request)
        except DashboardUnavailableError as error:
            # Not counted as a refusal: those are of requests for models.
            body = openai_error_body(error)
            await exchange.respond(JSONResponse(body, status_code=error.status))
            return
        await exchange.respond(Response(answer.body, answer.status, dict(answer.headers)))

    async def _serve_model(self, exchange: "_Exchange") -> None:
        body = await exchange.read_body(self._rules.max_body_bytes)
        exchange.context.body_read()
        fields = read_fields(body)
        check_request_id(fields.request_id)
        self._check(exchange.path, fields)
        target = RequestTarget(
            fields.model,
            fields.user_id() or exchange.context.request_id,
            needs_engine=exchange.path not in _ENGINELESS_ROUTES,
        )
        frontend = self._select(target)
        exchange.context.selected(frontend.name)
        if target.needs_engine:
            check_fields(body, frontend.refused_fields)
        headers = passed_headers(exchange.scope["headers"], self._rules.open_fields)
        app = await frontend.enter(target)
        exchange.context.admitted()
        await exchange.delegate(app, body, headers)

    def _check(self, path: str, fields: RequestFields) -> None:
        """Refuses what no engine should see, whichever model it is for."""
        rules = self._rules
        check_shapes(fields)
        # First what nobody may set, because its refusal says more.
        check_open_arguments(fields.vllm_xargs)
        check_steering(fields, rules.open_fields)
        if path in _GENERATE_ROUTES:
            check_sequences(fields, rules.max_sequences)
        elif path not in _ENGINELESS_ROUTES:
            check_inputs(fields, rules.max_inputs)

    def _select(self, target: RequestTarget) -> ModelFrontend:
        """Returns the requested model, or its canary in its place."""
        frontend = self._named(target.name)
        models = self._models.values()
        canaries = (model for model in models if model.canary_of == frontend.name)
        canary = next(canaries, None)
        if canary is None:
            return frontend
        is_adapter = target.name is not None and target.name != frontend.name
        if is_adapter and target.name not in canary.adapter_names:
            return frontend
        return canary if choose_canary(target.key, canary.canary()).is_taken else frontend

    def _named(self, name: str | None) -> ModelFrontend:
        served = [model for model in self._models.values() if model.canary_of is None]
        if name is None:
            if len(served) > 1:
                names = ", ".join(sorted(model.name for model in served))
                raise MalformedRequestError(
                    f"Several models are served here; name one of them: {names}.", param="model"
                )
            return served[0]
        if name in self._models:  # a canary too, by its own name
            return self._models[name]
        for frontend in served:
            if name in frontend.adapter_names:
                return frontend
        raise UnknownModelError(name, sorted(model.name for model in served))

    async def _model_list(self) -> dict[str, Any]:
        served = [model for model in self._models.values() if model.canary_of is None]
        cards = [card for frontend in served for card in await frontend.cards()]
        return {"object": "list", "data": cards}


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
        taken = _taken_request_id(scope)
        request_id = taken or uuid.uuid4().hex
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
        except RequestError as error:
            if self._status is not None:
                raise
            self.context.refused(error)
            await self._respond_error(error)
        except Exception:
            self._has_failed = True
            raise
        finally:
            self.context.ended(
                time.monotonic(),
                _route(self.path),
                self._status,
                is_whole=self._is_whole,
                # The client left before it had the whole answer; known at the end.
                is_cancelled=self._has_left or not (self._is_whole or self._has_failed),
            )

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
            error = self.context.failure or as_request_error(fault)
            self.context.failure = None  # told by what follows
            logger.warning("stream_failed route=%s cause=%s code=%s", self.path, cause, error.code)
            body = error_event(error, self.path, self._sent)
            await self._send_with_headers({"type": "http.response.body", "body": body})
        if self._is_replaced and self.context.failure is not None:
            error, self.context.failure = self.context.failure, None
            await self._respond_error(error)

    def _with_our_error(self, message: Message) -> Message:
        """Returns a part of an answer; vLLM's report of our error in a stream becomes ours."""
        body = message.get("body", b"")
        if self.context.failure is not None and self._is_stream and is_error_event(body):
            message = {**message, "body": error_event(self.context.failure, self.path)}
            self.context.failure = None  # told
        elif body and self.path in _NUMBERED_ROUTES:
            self._sent = body
        return message

    async def _respond_error(self, error: RequestError) -> None:
        body = error_body(error, self.path)
        response = JSONResponse(body, status_code=error.status, headers=error_headers(error))
        await self.respond(response)

    async def read_body(self, max_bytes: int) -> bytes:
        """Returns the whole body; a larger one is refused before it is held."""
        for name, value in self.scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
                raise RequestTooLargeError(max_bytes)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise MalformedRequestError("The client left before its request was complete.")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > max_bytes:
                raise RequestTooLargeError(max_bytes)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _send_with_headers(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # vLLM writes our errors in its own form, without their codes and without `Retry-After`.
            self._is_replaced = message["status"] >= 400 and self.context.failure is not None
        if self._is_replaced:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = _is_event_stream(message)
            headers = [*message.get("headers", []), *self._own_headers]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.context.answers()
            message = self._with_our_error(message)
            self._is_whole = not message.get("more_body", False)
        await self._send(message)


def _is_event_stream(start: Message) -> bool:
    headers = start.get("headers", [])
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _route(path: str) -> str:
    """Returns the path if it is one of ours: a client may not choose a label's value."""
    return path if path in _MODEL_ROUTES or path in _OWN_ROUTES else "other"


def _taken_request_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value.decode("latin-1"))
            if REQUEST_ID.fullmatch(text):
                return text
    return None


def complaint(broken: list[str]) -> str:
    """Returns what is wrong with a gateway that has lost the frontends of these models."""
    return f"the frontend of {', '.join(broken)} has died; this gateway has to be replaced"


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
