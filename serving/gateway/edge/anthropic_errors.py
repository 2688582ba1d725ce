"""Writes refusals on `/v1/messages` and below it in the form that Anthropic's clients read.

vLLM writes those of a body that it cannot read in OpenAI's form, and in the others names of its own
classes. Streams that have begun are not its business (`stream_errors`).
"""

import json
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.domain.errors import anthropic_error


class AnthropicRefusals:
    """Passes everything on but errors, which it writes anew."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        refused: HTTPStatus | None = None
        body = b""

        async def send_written_anew(message: Message) -> None:
            nonlocal refused, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refused = HTTPStatus(message["status"])
                return
            if refused is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                told = _message_of(body) or refused.phrase
                answer = JSONResponse(anthropic_error(refused, told), refused)
                await answer(scope, receive, send)

        await self._app(scope, receive, send_written_anew)


def _message_of(body: bytes) -> str | None:
    """Returns the message of an error in either form; `None` if there is none."""
    try:
        told: Any = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, str) else None
