"""The errors that Slicewise raises on purpose, and the HTTP status of each.

    SlicewiseError
    ├── ConfigError                  no status: the application does not start
    ├── UnsupportedVllmError         no status: install the vLLM that Slicewise is pinned to
    └── RequestError
        ├── MalformedRequestError    400  the client must change the request
        ├── DeadlineTooShortError    400  the client must give it longer, or ask for less
        ├── UnauthorizedError        401  the client must send a valid API key
        ├── ExpiredKeyError          401  likewise: the one it sent has ended
        ├── ForbiddenError           403  the client needs another key, or another model or route
        ├── UnknownModelError        404  the client must name a served model or adapter
        ├── UnknownRouteError        404  the client must ask a route that there is
        ├── WrongMethodError         405  the client must use a method of the route
        ├── BodyTimeoutError         408  the client must send its body faster
        ├── RequestTooLargeError     413  the client must send less
        ├── OverloadedError          429  retry after the stated time
        ├── NoRoomInTimeError        429  retry after the stated time
        ├── GatewayBehindError       429  retry after the stated time, with luck at another gateway
        ├── PoisonRequestError       500  give up: the same request would take engines down again
        ├── CannotResumeError        500, or 503 when another attempt may succeed
        ├── GatewayFaultError        500  a fault of ours: report it
        ├── EngineRefusedError       503  retry: the engine took the request and would not run it
        ├── VersionRetiredError      503  retry: the answer will be of another version
        ├── NoRoomForBodyError       503  retry after the stated time, with luck at another gateway
        ├── NoTimeForRequestError    503  retry after the stated time, with luck at another gateway
        ├── DashboardUnavailableError 503  ask for the page again later; requests for models go on
        └── NoEngineInTimeError      503  retry after the stated time

Owns the errors and their two wire shapes, OpenAI's and Anthropic's. Does not own the HTTP response
that carries them. Every error survives pickling, because Ray carries them between processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serving.domain.usage.quotas import format_amount

# Anthropic's error types by HTTP status. Source: Claude API reference, "Errors", read 2026-11-20.
# 503 has no type of its own there; "overloaded_error" is what its clients wait and retry on.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Characters of what a client asked for that are repeated to it; names of ours are no longer.
_MOST_ECHOED = 200


class SlicewiseError(Exception):
    """The base of the tree; catch it only at the rim."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The description of one fault in a configuration.

    `value` is the value as text, with secrets hidden; `None` when nothing was given. `allowed`
    describes what would be accepted in its place.
    """

    path: str
    complaint: str
    allowed: str
    value: str | None = None

    def __str__(self) -> str:
        """Returns one line: the path, the complaint, the value, and what is allowed."""
        given = "" if self.value is None else f" (value {self.value})"
        return f"{self.path}: {self.complaint}{given}; {self.allowed}"


class ConfigError(SlicewiseError):
    """The configuration cannot be used. Correct every problem it lists and start again."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """Returns a count, then one line per problem."""
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the configuration"
        return "\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)])


class UnsupportedVllmError(SlicewiseError):
    """The arguments of the installed vLLM cannot be read. Install the pinned version."""


class RequestError(SlicewiseError):
    """The base of the errors that a request is answered with.

    `kind` is OpenAI's error `type`. `param` names the field of the request that is to blame, `None`
    when no single field is. `retry_after_s` is the time that a client should wait before it tries
    again, `None` when waiting does not help. A message that `repeats_request` may hold words of the
    request, and is for its client alone. Each subclass passes its own arguments to `Exception`, so
    that it can be pickled.
    """

    status: int
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    repeats_request: bool = False
    message: str

    @property
    def log_reason(self) -> str:
        """The reason as logs have it, where no word of a request may be."""
        return "it is in the answer alone" if self.repeats_request else self.message

    def __str__(self) -> str:
        """Returns the message that a client reads."""
        return self.message


class MalformedRequestError(RequestError):
    """The request cannot be understood. The client must change it."""

    status = 400
    repeats_request = True

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code


class DeadlineTooShortError(RequestError):
    """No engine makes a first token in the time that its client gives. The client must change it.

    `takes_s` is what one takes at least on an engine that has nothing else to do, as lately seen.
    """

    status = 400
    code = "deadline_too_short"
    param = "x-slo-ttft-ms"

    def __init__(self, takes_s: float, patience_s: float) -> None:
        super().__init__(takes_s, patience_s)
        self.message = (
            f"A first token of this request takes {takes_s:.1f} s at least, as engines lately were,"
            f" and it has {patience_s:.1f} s; allowed: a longer time, or a shorter prompt."
        )


class UnauthorizedError(RequestError):
    """The request has no API key, or not one of ours. `reason` never repeats the key."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, reason: str = "Incorrect API key provided.") -> None:
        super().__init__(reason)
        self.message = reason


class ExpiredKeyError(RequestError):
    """The API key has ended. The client must send another one."""

    status = 401
    code = "expired_api_key"

    def __init__(self, name: str, ended_at: str) -> None:
        super().__init__(name, ended_at)
        self.message = f"The API key {name!r} expired at {ended_at}."


class ForbiddenError(RequestError):
    """The API key is not for this. The client needs another one, or asks for what is allowed.

    `name` is the key's, never the key; `what` is a model, a route, a scope or a `service_tier`.
    """

    status = 403
    repeats_request = True
    kind = "permission_error"

    def __init__(self, name: str, what: str, asked: str, allowed: Sequence[str]) -> None:
        super().__init__(name, what, asked, tuple(allowed))
        self.code = f"{what}_not_allowed"
        self.param = what if what in ("model", "service_tier") else None
        shown = ", ".join(allowed) or "none"
        told = asked[:_MOST_ECHOED]
        self.message = f"The API key {name!r} is not for the {what} {told!r}. Allowed: {shown}."


class UnknownModelError(RequestError):
    """The request names a model or adapter that is not served here."""

    status = 404
    repeats_request = True
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str, served: Sequence[str] = ()) -> None:
        super().__init__(model, tuple(served))
        self.message = f"The model {model[:_MOST_ECHOED]!r} does not exist."
        if served:
            self.message += f" Served here: {', '.join(served)}."


class UnknownRouteError(RequestError):
    """There is no such route."""

    status = 404
    code = "not_found"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.message = f"There is no route {path[:_MOST_ECHOED]}."


class UnknownRequestError(RequestError):
    """The gateway that was asked does not know the request, or no more. Ask the others."""

    status = 404
    code = "unknown_request"

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.message = (
            f"This gateway knows no request {request_id[:_MOST_ECHOED]}: another one had it, or it"
            " was too long ago."
        )


class WrongMethodError(RequestError):
    """The route has no such method. The client must use one of `methods`."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, methods: Sequence[str]) -> None:
        super().__init__(method, path, tuple(methods))
        self.methods = tuple(methods)
        self.message = f"{path} has no method {method[:20]}. Allowed: {', '.join(methods)}."


class RequestTooLargeError(RequestError):
    """The body is longer than the gateway reads."""

    status = 413
    code = "request_too_large"

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(max_body_bytes)
        self.message = f"The request body is larger than the {max_body_bytes} bytes allowed."


class BodyTimeoutError(RequestError):
    """The body did not come in time. The client must send it faster."""

    status = 408
    code = "body_timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.message = f"The request body did not come within {timeout_s:g} s."


class NoRoomForBodyError(RequestError):
    """The bodies in flight at this gateway take all the room there is. Retry."""

    status = 503
    kind = "overloaded_error"
    code = "no_room_for_body"
    retry_after_s = 5.0

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.message = (
            f"The request bodies in flight take the {max_bytes} bytes that this gateway has for "
            f"them; retry in {self.retry_after_s:.0f} s."
        )


class NoTimeForRequestError(RequestError):
    """The gateway has had no time to read a request that takes much of it. Retry."""

    status = 503
    kind = "overloaded_error"
    code = "no_time_for_request"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.message = (
            "This gateway has no time now for a request that takes long to read; "
            f"retry in {self.retry_after_s:.0f} s."
        )


class OverloadedError(RequestError):
    """Engines have too much to do for it. Retry after the stated time."""

    status = 429
    kind = "rate_limit_error"
    code = "overloaded"

    def __init__(self, model: str, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(model, num_waiting, retry_after_s)
        busy = f"{num_waiting} requests already wait for an engine of {model!r}"
        if not num_waiting:
            busy = f"The engines of {model!r} are busy for longer than the request has"
        self.message = f"{busy}; retry in {retry_after_s:.0f} s."
        self.retry_after_s = retry_after_s


class QuotaExceededError(RequestError):
    """The tenant has used what its quota allows. Retry as told."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, quota: str, used: float, retry_after_s: float) -> None:
        super().__init__(quota, used, retry_after_s)
        self.message = (
            f"{format_amount(used)} of {quota} are used; retry in {math.ceil(retry_after_s)} s."
        )
        self.retry_after_s = retry_after_s


class RequestOverQuotaError(RequestError):
    """The request alone needs more than its tenant's quota allows. It has to be a smaller one."""

    status = 400
    code = "request_over_quota"

    def __init__(self, quota: str, needs: float) -> None:
        super().__init__(quota, needs)
        self.message = f"The request needs {format_amount(needs)}. Allowed: {quota}."


class NoRoomInTimeError(RequestError):
    """The deadline of the first token passed before an engine had room. Retry as told."""

    status = 429
    kind = "rate_limit_error"
    code = "no_room_in_time"

    def __init__(self, model: str, waited_s: float, retry_after_s: float) -> None:
        super().__init__(model, waited_s, retry_after_s)
        self.message = (
            f"No engine of {model!r} had room within {waited_s:.1f} s; "
            f"retry in {retry_after_s:.0f} s."
        )
        self.retry_after_s = retry_after_s


class GatewayBehindError(RequestError):
    """The gateway is late with the tokens it has; one more request would delay all of them."""

    status = 429
    kind = "rate_limit_error"
    code = "gateway_behind"

    def __init__(self, model: str, behind_s: float) -> None:
        super().__init__(model, behind_s)
        self.retry_after_s = behind_s
        self.message = (
            f"The gateway is {behind_s:.1f} s behind with the tokens of {model!r}; "
            f"retry in {behind_s:.0f} s."
        )


class NoEngineInTimeError(RequestError):
    """The deadline passed before an engine was ready. Retry when a slice is expected."""

    status = 503
    kind = "server_error"
    code = "no_engine_in_time"

    def __init__(self, model: str, waited_s: float, retry_after_s: float) -> None:
        super().__init__(model, waited_s, retry_after_s)
        self.message = (
            f"No engine of {model!r} became ready within {waited_s:.1f} s; "
            f"retry in {retry_after_s:.0f} s."
        )
        self.retry_after_s = retry_after_s


class DashboardUnavailableError(RequestError):
    """The dashboard cannot serve its pages now. Ask again; requests for models go on."""

    status = 503
    kind = "server_error"
    code = "dashboard_unavailable"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.message = (
            f"The dashboard does not answer: {reason}. `slicewise status` shows the fleet."
        )


class VersionRetiredError(RequestError):
    """The model was replaced, and no engine is left that could go on with this answer. Retry.

    Another version's engines are not asked: their tokens could be those of another answer.
    """

    status = 503
    kind = "server_error"
    code = "version_retired"

    def __init__(self, model: str, version: str, retry_after_s: float) -> None:
        super().__init__(model, version, retry_after_s)
        self.message = (
            f"The version {version!r} of {model!r}, which this answer is of, has been replaced and "
            "its last engine is gone; a new request will be answered by the present version."
        )
        self.retry_after_s = retry_after_s


class PoisonRequestError(RequestError):
    """The request lost engine after engine, or they failed at it. Give up: it is not sent again."""

    status = 500
    kind = "server_error"
    code = "poison_request"

    def __init__(self, num_engines_lost: int) -> None:
        super().__init__(num_engines_lost)
        self.message = (
            f"{num_engines_lost} engines were lost or failed at this request while they held it, "
            "which is the bound; it will not be sent to another one."
        )


class CannotResumeError(RequestError):
    """The engine was lost and the request cannot go on elsewhere.

    The status is 503 if `retry_after_s` is set, because a fresh attempt may succeed, and 500 if
    `retry_after_s` is `None`.
    """

    kind = "server_error"
    code = "cannot_resume"

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason, retry_after_s)
        self.message = f"The engine was lost and the request cannot be resumed: {reason}"
        self.status = 500 if retry_after_s is None else 503
        self.retry_after_s = retry_after_s


class NoTokenLeftError(RequestError):
    """What a request asks of its answer contradicts itself. The client must change it.

    `fields` are those besides the one with the grammar, each of which forbids tokens. Found while
    the answer is made, after `num_tokens` of it: most such requests have an answer.
    """

    status = 400
    code = "no_token_left"

    def __init__(self, fields: Sequence[str], num_tokens: int) -> None:
        super().__init__(fields, num_tokens)
        self.message = (
            f"After {num_tokens} tokens of the answer, no token keeps both the structured output "
            f"that was asked for and: {', '.join(fields)}. Allowed: what leaves one."
        )


class GatewayFaultError(RequestError):
    """The gateway failed at the request for a reason of its own, which its log has."""

    status = 500
    kind = "server_error"
    code = "internal_error"
    message = "The gateway failed at this request."


class EngineRefusedError(RequestError):
    """The engine would not run the request; `reason` is its own (a full queue, a bad payload)."""

    status = 503
    kind = "server_error"
    code = "engine_refused"

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.message = f"The engine refused the request: {reason}"
        self.retry_after_s = retry_after_s


def openai_error_body(error: RequestError) -> dict[str, object]:
    """Returns the JSON body that OpenAI's clients expect."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error_body(error: RequestError) -> dict[str, object]:
    """Returns the JSON body that Anthropic's clients expect, for `/v1/messages`."""
    return anthropic_error(error.status, error.message)


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """Returns the same for an error of which only the status and the message are known."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(error: RequestError, path: str) -> dict[str, object]:
    """Returns the body that the clients of this route expect."""
    if path.startswith("/v1/messages"):
        return anthropic_error_body(error)
    return openai_error_body(error)


def error_headers(error: RequestError) -> dict[str, str]:
    """Returns the response headers that go with `error`; the same for both shapes.

    OpenAI's and Anthropic's own clients resend on every status from 500 up unless
    `x-should-retry` is "false"; resending a poison request would cost as many engines again.
    """
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif error.status >= 500:
        headers["x-should-retry"] = "false"
    if isinstance(error, WrongMethodError):
        headers["Allow"] = ", ".join(error.methods)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
