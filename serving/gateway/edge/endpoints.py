"""Chat and completions past FastAPI: vLLM's own endpoints, without what costs most around them.

FastAPI finds the route anew, solves its dependencies and opens two stacks of resources for each
request; vLLM's decorators and Starlette's streams add four tasks, by which a client that leaves is
seen. Here the endpoint of a known route is called with the same record of the body, made by the
route's own validator, within the same middlewares and handlers of errors, and one task sees that
the client leaves.

Owns which requests take this way: those that it can read. Every other one, every body that is
refused among them, takes FastAPI's, which words the refusal. Does not own what the endpoints do.
"""

import contextlib
import copy
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError

from serving.config.api_keys import ModelRoute
from serving.gateway.forks.bodies.prepared_app import receiving
from serving.gateway.streams.known.chats import KnownAnswer, KnownChats
from serving.gateway.streams.known.forms import LESSON, form_of
from serving.gateway.streams.leaving import ClientLeftError, UntilClientLeaves

_ROUTES = (ModelRoute.CHAT_COMPLETIONS, ModelRoute.COMPLETIONS)
# Where a request's record is between the reading of its body and its endpoint, or its answer.
_RECORD, _ANSWER = "slicewise.record", "slicewise.answer"
# FastAPI and vLLM read other spellings of it too.
_JSON_TYPES = frozenset(
    {b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"}
)


class ShortPath:
    """Serves an application of vLLM's, chat and completions past FastAPI."""

    def __init__(self, app: FastAPI, stack: ASGIApp, known: KnownChats | None = None) -> None:
        """Stands for `stack`, the built middlewares of `app` with FastAPI's router below them.

        Streamed chats of forms that are `known` do without vLLM's endpoint too.
        """
        self._app = app
        self._known = known
        self._stack = stack
        self._endpoints = _endpoints(app)
        self._short = _with_inner(stack, self._answer)
        # vLLM's metrics of HTTP. The others word errors, which a known answer has none of, and let
        # web pages in, which the edge does.
        self._counted = _counted(stack, self._send_known)

    @property
    def routes(self) -> frozenset[str]:
        """The routes that are served past FastAPI; none if the application is not as we know it."""
        return frozenset() if self._short is None else frozenset(self._endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if (
            endpoint is None
            or self._short is None
            or not _is_json(scope)
            # It counts the requests whose handlers it has wrapped.
            or getattr(self._app.state, "enable_server_load_tracking", False)
        ):
            await self._stack(scope, receive, send)
            return
        first = await receive()
        body: Any = None if first.get("more_body", False) else _read(first.get("body", b""))
        key = None
        if self._known is not None and scope["path"] == ModelRoute.CHAT_COMPLETIONS:
            key = form_of(body, scope["headers"])
            if key is not None:
                answer = await self._known.answer_to(key, body)
                if answer is not None and _is_asked(answer):
                    scope[_ANSWER] = answer
                    await self._counted(scope, receive, send)
                    return
        record = None if body is None else endpoint.record_of(body)
        if record is None:
            await self._stack(scope, receiving(first, receive), send)
            return
        scope[_RECORD] = record
        if self._known is None or key is None or (lesson := self._known.begin_lesson(key)) is None:
            await self._short(scope, receive, send)
            return
        LESSON.set(lesson)
        await self._short(scope, receive, send)
        self._known.learn(key, lesson)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that has a record; a client that leaves ends it."""
        endpoint, record = self._endpoints[scope["path"]], scope.pop(_RECORD)
        response: Response | None = None
        try:
            async with UntilClientLeaves(receive):
                response = await endpoint.call(record, Request(scope, receive, send))
                if isinstance(response, StreamingResponse):
                    await response.stream_response(send)
        except ClientLeftError:
            if not isinstance(response, StreamingResponse):
                # What vLLM answers who has left. Nobody reads it, and it is counted.
                response = JSONResponse(None)
        if isinstance(response, StreamingResponse):
            return
        assert response is not None
        await response(scope, receive, send)

    async def _send_known(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends an answer of a known form; a client that leaves ends it."""
        answer: KnownAnswer = scope.pop(_ANSWER)
        with contextlib.suppress(ClientLeftError):
            async with UntilClientLeaves(receive):
                await answer.send(send)


class _Endpoint:
    """The endpoint of one route, without vLLM's decorators, and the validator of its body."""

    def __init__(self, route: APIRoute) -> None:
        self.call: Callable[[Any, Request], Any] = inspect.unwrap(route.endpoint)
        assert route.body_field is not None
        self._validate = route.body_field.validate

    def record_of(self, body: Any) -> Any:
        """Returns vLLM's record of a body that was read; `None` if it is refused."""
        try:
            record, errors = self._validate(body, {}, loc=("body",))
        except Exception:  # noqa: BLE001 - whatever it is, FastAPI meets and words it
            return None
        return None if errors else record


def _read(body: bytes) -> Any:
    """Returns what a body says; `None` if it is no JSON."""
    try:
        return json.loads(body)
    except Exception:  # noqa: BLE001 - whatever it is, FastAPI meets and words it
        return None


def _is_asked(answer: KnownAnswer) -> bool:
    """Asks an engine; returns `False` if vLLM has to word why that cannot be."""
    try:
        answer.ask()
    except VLLMValidationError:
        return False
    return True


def _endpoints(app: FastAPI) -> Mapping[str, _Endpoint]:
    """Returns the endpoints of the routes that are as we know them, by path."""
    routes = (route for route in app.routes if isinstance(route, APIRoute))
    return {route.path: _Endpoint(route) for route in routes if _is_known(route)}


def _is_known(route: APIRoute) -> bool:
    if route.path not in _ROUTES or route.methods != {"POST"} or route.body_field is None:
        return False
    needed = [dependency.call for dependency in route.dependant.dependencies]
    takes = list(inspect.signature(inspect.unwrap(route.endpoint)).parameters)
    return needed == [validate_json_request] and takes == ["request", "raw_request"]


def _with_inner(stack: ASGIApp, inner: ASGIApp) -> ASGIApp | None:
    """Returns the same middlewares around `inner`, in place of FastAPI's router.

    `None` if one of them does not show what it is around.
    """
    layers: list[Any] = []
    layer: Any = stack
    while not isinstance(layer, AsyncExitStackMiddleware):  # it is for uploaded files
        layers.append(layer)
        layer = getattr(layer, "app", None)
        if layer is None:
            return None
    app = inner
    for each in reversed(layers):
        app = _around(each, app)
    return app


def _counted(stack: ASGIApp, inner: ASGIApp) -> ASGIApp:
    """Returns `inner` within the one middleware that counts requests, if there is one."""
    layer: Any = stack
    while layer is not None and not isinstance(layer, PrometheusInstrumentatorMiddleware):
        layer = getattr(layer, "app", None)
    return inner if layer is None else _around(layer, inner)


def _around(layer: Any, app: ASGIApp) -> ASGIApp:
    """Returns a middleware like `layer` around `app`."""
    around = copy.copy(layer)
    around.app = app
    if isinstance(around, PrometheusInstrumentatorMiddleware):
        # It would find the route anew.
        around._get_handler = _path_of  # type: ignore[method-assign]
    found: ASGIApp = around
    return found


def _path_of(request: Request) -> tuple[str, bool]:
    """Returns the path, which is that of a route."""
    return request.scope["path"], True


def _is_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return scope["method"] == "POST" and len(kinds) == 1 and kinds[0].lower() in _JSON_TYPES
