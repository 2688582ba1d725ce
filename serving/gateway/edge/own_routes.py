"""The gateway's own routes: `/v1/models`, `/metrics`, `/fleet`, `/openapi.json` and `/health`.

Decides what they answer to whom. Does not own the figures behind them, nor how a request came.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import JSONResponse, PlainTextResponse, Response

from serving.config.api_keys import KeyRecord
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import (
    DashboardUnavailableError,
    RequestError,
    UnknownModelError,
    UnknownRequestError,
    UnknownRouteError,
    WrongMethodError,
    error_headers,
    openai_error_body,
)
from serving.gateway.edge import routes
from serving.gateway.edge.auth import check_scope, may_use
from serving.gateway.reports.fleet_pages import is_static_page

# The same address gives people the dashboard's page. What was read with a key stays in no cache.
_FLEET_HEADERS = {
    "content-type": "application/json",
    "vary": "Accept",
    "cache-control": "no-store",
}


class NamedModel(Protocol):
    """What is asked of a model to know which requests are for it."""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that select it too."""
        ...

    @property
    def canary_of(self) -> str | None:
        """The model whose requests it takes a share of; `None` for most models."""
        ...


class ListedModel(NamedModel, Protocol):
    """The interface of one served model for the lists of models."""

    @property
    def name(self) -> str:
        """The `model` field that selects it."""
        ...

    @property
    def is_broken(self) -> bool:
        """True if it answers nothing any more and does not recover."""
        ...

    @property
    def served_routes(self) -> frozenset[str]:
        """The routes that it answers; none while it is not known which."""
        ...

    async def cards(self) -> list[dict[str, Any]]:
        """Returns its entries of `/v1/models`."""
        ...


@dataclass(frozen=True, slots=True)
class OwnRequest:
    """A request for one of the gateway's own routes; headers that did not come are empty."""

    method: str
    path: str
    query: str = ""
    accept: str = ""
    if_none_match: str = ""

    @property
    def is_open(self) -> bool:
        """True if it needs no key: it asks for health, or for a page that holds no data."""
        return self.path == routes.HEALTH or is_static_page(self.method, self.path, self.accept)


@dataclass(frozen=True, slots=True)
class GatewayReaders:
    """What reads a gateway's figures.

    `render_metrics` gets the reader's `Accept` header, `describe_api` the reader's key,
    `describe_request` a request's id; it returns `None` for one that this gateway does not know.
    """

    render_metrics: Callable[[str], Awaitable[tuple[bytes, str]]]
    describe_fleet: Callable[[], dict[str, Any]]
    ask_dashboard: Callable[[PageRequest], Awaitable[PageAnswer]]
    describe_api: Callable[[KeyRecord], dict[str, Any]]
    describe_request: Callable[[str], dict[str, Any] | None]
    gateway_id: str = ""


class OwnRoutes:
    """Answers the gateway's own routes."""

    def __init__(self, models: Mapping[str, ListedModel], readers: GatewayReaders) -> None:
        self._models = models
        self._readers = readers

    @property
    def broken_models(self) -> list[str]:
        """The models that this gateway cannot answer for any more. It has to be replaced."""
        return sorted(name for name, model in self._models.items() if model.is_broken)

    async def answer(self, request: OwnRequest, holder: KeyRecord) -> Response:
        """Returns the answer for the holder of a key.

        Raises:
            RequestError: the key is not for this route.
        """
        route = routes.route_of(request.path)
        if is_static_page(request.method, request.path, request.accept):
            return await self._page(request)
        if route is None:
            return _refused(UnknownRouteError(request.path))
        if request.method not in routes.OWN_METHODS:
            methods = routes.methods_of(route)
            return _refused(WrongMethodError(request.method, request.path, methods))
        scope = routes.OWN_ROUTES[route]
        if scope is not None:
            check_scope(holder, scope)
        return await self._answer(route, request, holder)

    async def _answer(self, route: str, request: OwnRequest, holder: KeyRecord) -> Response:
        if route == routes.HEALTH:
            return self._health()
        if route == routes.MODELS:
            data = await self._cards(self._listed(holder), holder)
            return JSONResponse({"object": "list", "data": data})
        if route == routes.ONE_MODEL:
            return await self._one_model(routes.part_of(request.path, route), holder)
        if route == routes.METRICS:
            body, content_type = await self._readers.render_metrics(request.accept)
            return Response(body, media_type=content_type)
        if route == routes.FLEET_HISTORY:
            return await self._page(request)
        if route == routes.ONE_REQUEST:
            return self._one_request(routes.part_of(request.path, route))
        if route == routes.API_DESCRIPTION:
            described = msgspec.json.encode(self._readers.describe_api(holder))
            return Response(described, media_type="application/json")
        # One loop serves this and every stream: a large fleet's answer has to be encoded fast.
        body = msgspec.json.encode(self._readers.describe_fleet())
        return Response(body, headers=_FLEET_HEADERS)

    def _health(self) -> Response:
        broken = self.broken_models
        text = f"{complaint(broken)}\n" if broken else ""
        return PlainTextResponse(text, 503 if broken else 200)

    def _listed(self, holder: KeyRecord) -> list[ListedModel]:
        """Returns the models of which the holder of a key may use some name."""
        served = [model for model in self._models.values() if model.canary_of is None]
        return [model for model in served if any(may_use(holder, name) for name in _names(model))]

    async def _cards(
        self, models: Iterable[ListedModel], holder: KeyRecord
    ) -> list[dict[str, Any]]:
        cards = [card for model in models for card in await model.cards()]
        return [card for card in cards if may_use(holder, str(card["id"]))]

    async def _one_model(self, name: str, holder: KeyRecord) -> Response:
        listed = self._listed(holder)
        # Only the one that has the name is asked for its cards.
        named = [model for model in listed if name in _names(model)]
        found = [card for card in await self._cards(named, holder) if card["id"] == name]
        if found:
            return JSONResponse(found[0])
        allowed = [each for model in listed for each in _names(model) if may_use(holder, each)]
        return _refused(UnknownModelError(name[:200], sorted(allowed)))

    def _one_request(self, request_id: str) -> Response:
        """Returns its story. Who finds none here may find it at another gateway."""
        described = self._readers.describe_request(request_id)
        status = 200
        if described is None:
            error = UnknownRequestError(request_id)
            described, status = openai_error_body(error), error.status
        body = msgspec.json.encode({"gateway": self._readers.gateway_id, **described})
        return Response(body, status, _FLEET_HEADERS)

    async def _page(self, request: OwnRequest) -> Response:
        """Passes on the dashboard's answer, or the reason why there is none."""
        asked = PageRequest(request.path, request.query, request.if_none_match)
        try:
            answer = await self._readers.ask_dashboard(asked)
        except DashboardUnavailableError as error:
            return _refused(error)
        return Response(answer.body, answer.status, dict(answer.headers))


def _names(model: ListedModel) -> tuple[str, ...]:
    return (model.name, *model.adapter_names)


def _refused(error: RequestError) -> Response:
    # Not raised, and so not counted as a refusal: those are of requests for models.
    headers = error_headers(error)
    return JSONResponse(openai_error_body(error), status_code=error.status, headers=headers)


def complaint(broken: list[str]) -> str:
    """Returns what is wrong with a gateway that has lost the frontends of these models."""
    return f"the frontend of {', '.join(broken)} has died; this gateway has to be replaced"
