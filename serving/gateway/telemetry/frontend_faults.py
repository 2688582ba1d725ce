"""Logs what vLLM's frontend answers with status 500, and where in the code that came from.

vLLM answers a fault of its own, or of ours below it, and tells nobody; often its message is empty
(`EngineGenerateError`). Owns the log line. Messages are left out of it: they may hold what the
client sent.
"""

import logging
import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import WebSocketRequestValidationError
from starlette.responses import Response

from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT

logger = logging.getLogger(__name__)

_MAX_CAUSES = 5  # of a fault, and of its causes' causes
_Handler = Callable[[Request, Any], Response | Awaitable[Response]]


def tell_faults(app: FastAPI, is_refusal: Callable[[Exception], bool]) -> None:
    """Has an application log its faults, once its middleware is built with these handlers.

    What `is_refusal` is the client's fault, whatever the handler's answer.
    """
    for kind, handler in list(app.exception_handlers.items()):
        if kind is not WebSocketRequestValidationError:
            app.exception_handlers[kind] = _telling(handler, is_refusal)


def _telling(answer: _Handler, is_refusal: Callable[[Exception], bool]) -> _Handler:
    async def told(request: Request, fault: Exception) -> Response:
        answered = answer(request, fault)
        response = answered if isinstance(answered, Response) else await answered
        is_fault = response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        if is_fault and not is_refusal(fault):
            context = REQUEST_CONTEXT.get()
            logger.error(
                "frontend_fault request=%s path=%s cause=%r",
                None if context is None else context.request_id,
                request.url.path,
                causes_of(fault),
            )
        return response

    return told


def causes_of(fault: BaseException) -> str:
    """Returns the classes of a fault and of its causes, each with the place that raised it."""
    told: list[str] = []
    cause: BaseException | None = fault
    while cause is not None and len(told) < _MAX_CAUSES:
        frames = traceback.extract_tb(cause.__traceback__)
        place = f" at {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        told.append(f"{type(cause).__name__}{place}")
        cause = cause.__cause__ or cause.__context__
    return " from ".join(told)
