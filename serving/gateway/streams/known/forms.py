"""Streamed chats of a form that vLLM has handled before: what it made of the form is used again.

The form of a request is all of it but the texts of its messages, its longest answer and its user.
What vLLM makes of a body depends on its form and on the tokens of its prompt, and most clients send
few forms. So the first two requests of a form take vLLM's way, and on the second a `Lesson` is
filled; what that came to, a `KnownForm`, serves the requests after it (`chats`). Nothing of vLLM's
reading of a body is written anew here, and what is not as it was in the lesson takes vLLM's way.

Owns which requests have a form, and what is to be known of one.
"""

from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.parser.abstract_parser import Parser
from vllm.v1.engine import EngineCoreRequest

# The fields that a form may have. None of them is read with the texts of the messages in mind.
_FIELDS = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "user", "service_tier"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "chat_template_kwargs"),
        *("stop_token_ids", "skip_special_tokens", "n", "logprobs"),
    }
)
# They differ from request to request: messages are rendered, the most tokens are put in anew, and
# who asks is nothing to vLLM.
_MOST_TOKENS = ("max_completion_tokens", "max_tokens")
_VARYING = frozenset({"messages", "user", *_MOST_TOKENS})
_LARGEST = 2**31
_MESSAGE = {"role", "content"}
_ROLES = frozenset({"system", "user", "assistant"})
# As many as are rendered on the loop: a short body may have many, and each takes some 20 us.
MOST_MESSAGES = 16
# Headers that vLLM reads beside the request's id.
_READ_HEADERS = frozenset(
    {b"x-data-parallel-rank", b"x-session-id", b"x-vllm-priority", b"traceparent", b"tracestate"}
)
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class KnownForm:
    """What vLLM makes of the requests of a form, but for their prompts.

    `render` are the arguments of the renderer behind the messages. `core_request` is what an engine
    was given, without its prompt, with another id and length. `first_chunk` is the event before the
    first text, with marks for its id and time. `has_usage` says that the answer's tokens are told
    at its end, `has_empty` that events without text are sent. `parser` may be asked whether a
    prompt ends the model's thoughts; `None` if it has none to think.
    """

    model_name: str
    render: tuple[tuple[Any, ...], Mapping[str, Any]]
    core_request: EngineCoreRequest
    first_chunk: str
    has_usage: bool
    has_empty: bool
    parser: Parser | None


@dataclass(slots=True)
class Lesson:
    """What is learned of a form while vLLM handles a request of it; `None` until it is known.

    `is_plain` says that all of the answer's text came as it is.
    """

    has_usage: bool = False
    render: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    core_request: EngineCoreRequest | None = None
    model_name: str | None = None
    first_chunk: str | None = None
    is_plain: bool = False
    has_empty: bool = True
    parser: Parser | None = None

    @property
    def form(self) -> KnownForm | None:
        """What it came to; `None` if requests of this form always take vLLM's way."""
        request = self.core_request
        if not self.is_plain or self.render is None or request is None:
            return None
        if self.model_name is None or self.first_chunk is None or not _is_simple(request):
            return None
        return KnownForm(
            self.model_name,
            self.render,
            request,
            self.first_chunk,
            self.has_usage,
            self.has_empty,
            self.parser,
        )


# Of the request that is being handled; `None` while nothing is to be learned of it.
LESSON: ContextVar[Lesson | None] = ContextVar("LESSON", default=None)


def _is_simple(request: EngineCoreRequest) -> bool:
    """Returns whether an engine was given tokens and parameters of sampling, and nothing else."""
    params = request.sampling_params
    return (
        params is not None
        and not (params.stop or params.structured_outputs or params.logprobs is not None)
        and params.prompt_logprobs is None
        and (params.skip_special_tokens or params.spaces_between_special_tokens)
        and not request.mm_features
        and request.prompt_embeds is None
        and request.trace_headers is None
        and request.session_id is None
    )


def form_of(body: Any, headers: Collection[tuple[bytes, bytes]]) -> bytes | None:
    """Returns what stands for the form of a chat's body; `None` if it has none."""
    if not isinstance(body, dict) or not body.keys() <= _FIELDS or body.get("stream") is not True:
        return None
    if body.get("n") not in (None, 1) or not isinstance(body.get("user", ""), str):
        return None
    if not all(_is_length(body.get(name)) for name in _MOST_TOKENS):
        return None
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        return None
    if not all(map(_is_text, messages)) or any(name in _READ_HEADERS for name, _ in headers):
        return None
    rest = {name: value for name, value in body.items() if name not in _VARYING}
    try:
        return _encode(rest)
    except (OverflowError, UnicodeError, ValueError):
        return None


def most_tokens_in(body: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a body that has a form asks for at most; `None` if it does not."""
    found = (body[name] for name in _MOST_TOKENS if body.get(name) is not None)
    most: int | None = next(found, None)
    return most


def _is_length(value: Any) -> bool:
    return value is None or (type(value) is int and 0 < value < _LARGEST)


def _is_text(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == _MESSAGE
        and isinstance(message["role"], str)
        and message["role"] in _ROLES
        and isinstance(message["content"], str)
    )
