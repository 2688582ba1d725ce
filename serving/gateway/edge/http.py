"""The HTTP edge of the gateway: it decides who may ask, and for which model.

Owns keys, body limits, the choice of a model's frontend, admission before a stream starts, and
`/ready`. The gateway's other own routes are in `own_routes`, and what becomes of an answer on its
way in `answers.exchange`. Every other byte of a response is vLLM's. Prompts and answers are never
logged.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.config.api_keys import KeyRecord, KeyScope
from serving.config.application import AppConfig, OpenField
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import (
    MalformedRequestError,
    UnknownModelError,
    WrongMethodError,
    error_headers,
)
from serving.domain.limits import BODY_BUDGET_BYTES, BODY_TIMEOUT_S, MAX_INPUTS, MAX_SEQUENCES
from serving.domain.models.request_fields.service_class import ServiceTier, tier_of_key
from serving.domain.usage.quotas import Quota
from serving.gateway.batches.records import Batch
from serving.gateway.batches.routes import BatchRoutes
from serving.gateway.dispatch.admission import BodyLimits, BodyRoom, RequestTarget
from serving.gateway.dispatch.choice.routing import CanaryView, choose_canary
from serving.gateway.edge.answers.exchange import HttpExchange, path_of
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
    BodyJudge,
    asked_ttft_s,
    check_fields,
    is_large,
    judge_fields,
    passed_headers,
    read_fields,
)
from serving.gateway.edge.own_routes import (
    GatewayReaders,
    ListedModel,
    NamedModel,
    OwnRequest,
    OwnRoutes,
)
from serving.gateway.edge.readiness import Readiness
from serving.gateway.edge.routes import (
    ENGINELESS_ROUTES,
    MODEL_METHODS,
    MODEL_ROUTES,
    OWN_METHODS,
    READY,
    batch_route_of,
    methods_of,
    route_of,
)
from serving.gateway.forks.bodies.messages import BodyRules
from serving.gateway.forks.bodies.reader import BodyReader
from serving.gateway.forks.bodies.sizes import SHORT_BYTES
from serving.gateway.quotas.book import QuotaBook
from serving.gateway.streams.connections import ClientConnection
from serving.gateway.streams.leaving import ReceiveInTurns
from serving.gateway.streams.turns import Turns
from serving.gateway.streams.unread import UnreadAnswers, UnreadLimits
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT, EdgeMetrics
from serving.gateway.telemetry.request_story import RequestStories
from serving.telemetry.spans import NO_TRACER, Tracer


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
        elif scope["type"] == "http" and path_of(scope) == READY:
            await self._answer_ready(scope["method"])(scope, receive, send)
        elif scope["type"] == "http":
            client = ReceiveInTurns(receive, self._leaving)
            exchange = HttpExchange(scope, client, send, self.metrics)
            if self._tracer.is_on and exchange.path in MODEL_ROUTES:
                exchange.begin_trace(self._tracer)
            await exchange.run(self._serve)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def answer_line(self, scope: Scope, receive: Receive, send: Send, batch: Batch) -> None:
        """Serves one line of a batch as a request of the key that made the batch, in its class."""

        async def serve(exchange: HttpExchange) -> None:
            await self._turns.wait()
            exchange.context.tenant = batch.tenant
            exchange.context.batch_id = batch.batch_id
            holder = self._rules.keys.check_later(batch.key, batch.tenant, time.time())
            exchange.context.weight = holder.weight
            check_route(holder, exchange.path)
            await self._serve_model(exchange, holder, ServiceTier.FLEX)

        client = ReceiveInTurns(receive, self._leaving)
        exchange = HttpExchange(scope, client, send, self.metrics)
        if self._tracer.is_on:
            exchange.begin_trace(self._tracer)
        await exchange.run(serve)

    def _answer_ready(self, method: str) -> Response:
        if method not in OWN_METHODS:
            error = WrongMethodError(method, READY, OWN_METHODS)
            return PlainTextResponse(f"{error.message}\n", error.status, error_headers(error))
        ready = self._readiness()
        return PlainTextResponse(f"{ready.reason}\n", 200 if ready.is_ready else 503)

    async def _serve(self, exchange: HttpExchange) -> None:
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

    async def _share(self, exchange: HttpExchange) -> bool:
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

    def _authorize(self, exchange: HttpExchange) -> KeyRecord:
        """Returns what the request's key may do, and puts the request on its tenant's account."""
        holder = self._rules.keys.check(presented_key(exchange.scope["headers"]), time.time())
        exchange.context.tenant = holder.tenant or DEFAULT_TENANT
        exchange.context.weight = holder.weight
        return holder

    async def _serve_model(
        self, exchange: HttpExchange, holder: KeyRecord, tier: ServiceTier | None = None
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
        if name is not None:
            check_model(holder, name)
        found = model_behind(name, self._models)
        if found is not None and (name is not None or may_use(holder, found)):
            return self._models[found]
        served = (model for model in self._models.values() if model.canary_of is None)
        allowed = _allowed_names(served, holder)
        if name is not None:
            raise UnknownModelError(name, allowed)
        names = ", ".join(allowed) or "none"
        raise MalformedRequestError(f"No model is named. Allowed: {names}.", param="model")


def model_behind(name: str | None, models: Mapping[str, NamedModel]) -> str | None:
    """Returns the model that answers to a name in a request, its own or an adapter's.

    A request without one, `None`, is for the only model, if there is one beside canaries. `None` is
    returned where there is no such model.
    """
    if name in models:  # a canary too, by its own name
        return name
    served = {each: model for each, model in models.items() if model.canary_of is None}
    if name is None:
        return next(iter(served)) if len(served) == 1 else None
    return next((each for each, model in served.items() if name in model.adapter_names), None)


def _allowed_names(models: Iterable[ModelFrontend], holder: KeyRecord) -> list[str]:
    """Returns the names of models and adapters that the holder of a key may use."""
    names = (name for model in models for name in (model.name, *model.adapter_names))
    return sorted(name for name in names if may_use(holder, name))


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
