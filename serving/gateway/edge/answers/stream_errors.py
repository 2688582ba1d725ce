"""The errors of a stream that has begun, in the form that the clients of its route read.

vLLM writes them without type and code, on `/v1/messages` as a fault of its own, and on
`/v1/responses` not at all: the stream just ends. Pure.
"""

import json
import re
from typing import Any

from serving.domain.errors import (
    GatewayFaultError,
    RequestError,
    error_body,
    openai_error_body,
)

# What vLLM begins an error with in a stream. No text of a model can: it is within a field.
_BEGINNINGS = (b'data: {"error"', b"event: error\n")
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')


def is_error_event(chunk: bytes) -> bool:
    """Returns whether a chunk of a stream is vLLM's report of an error."""
    return chunk.startswith(_BEGINNINGS)


def error_event(error: RequestError, path: str, sent: bytes = b"") -> bytes:
    """Returns the event that tells a client of `path` that its stream ends with `error`.

    `sent` is what it was sent last: events of `/v1/responses` are numbered.
    """
    if path == "/v1/responses":
        numbers = _SEQUENCE_NUMBER.findall(sent)
        told = openai_error_body(error)["error"]
        assert isinstance(told, dict)
        event = {
            "type": "error",
            "code": error.code or told["type"],
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return _event("error", event)
    if path == "/v1/messages":
        return _event("error", error_body(error, path))
    return f"data: {json.dumps(error_body(error, path))}\n\n".encode()


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


class _AnsweredError(RequestError):
    """A model's application has answered with an error. What the client does is up to the status.

    `told` is what the answer says of it, in either API's form.
    """

    def __init__(self, status: int, told: dict[str, Any]) -> None:
        super().__init__(status, told)
        self.status = status
        self.message = str(told["message"])
        self.kind = str(told.get("type") or self.kind)
        self.param, self.code = _text(told.get("param")), _text(told.get("code"))


def answered_error(status: int, body: bytes) -> RequestError:
    """Returns the error that an application has answered with in place of a stream.

    An answer that is none, or cannot be read, is a fault of the gateway.
    """
    try:
        told: Any = json.loads(body)["error"]
        return _AnsweredError(status, told) if status >= 400 else GatewayFaultError()
    except (ValueError, KeyError, TypeError):
        return GatewayFaultError()


def _text(value: object) -> str | None:
    # Among vLLM's are numbers: the status, which a stream cannot have any more.
    return None if value is None else str(value)


def as_request_error(fault: BaseException) -> RequestError:
    """Returns the error for a stream that a model's application left with `fault`."""
    return fault if isinstance(fault, RequestError) else GatewayFaultError()
