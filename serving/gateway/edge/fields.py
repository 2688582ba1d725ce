"""The fields of a request's body at the edge: those it reads, and what it refuses in them.

Refused are values that a model's engines do not honour (`domain.models.request_fields`), fields and
headers with which a client would steer engines, what no client may set, and a request for too much
at once. An engine that got such a value would fail without a reason, or drop it in silence.
All other fields are vLLM's business, and what vLLM makes of them is judged once more (`frontend`).
Pure.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from serving.config.api_keys import ModelRoute
from serving.config.application import OpenField
from serving.domain.errors import MalformedRequestError
from serving.domain.models.request_fields.refusals import (
    BODY_FIELDS,
    ValueRule,
    body_rules,
    kind_of,
    unread_rules,
)
from serving.domain.models.request_fields.routes import UNREAD
from serving.domain.models.request_fields.rules import EngineFacts
from serving.domain.models.request_fields.service_class import TIERS_ASKED, ServiceTier, tier_asked
from serving.gateway.edge.routes import ENGINELESS_ROUTES, GENERATE_ROUTES
from serving.gateway.forks.bodies.messages import BodyRules, JudgedBody
from serving.gateway.forks.bodies.sizes import (
    LARGE_BYTES,
    LARGE_NAMES,
    LARGE_VALUES,
    LARGE_VALUES_OF,
)
from serving.link.messages import RESERVED_ARG_PREFIX

_ABSENT = msgspec.Raw()
_PROMPT_LOGPROBS, _ECHO = "prompt_logprobs", "echo"

# What a request may be called: its id is logged, echoed and sent with every token, so it may
# neither carry line ends nor grow without bound.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

# `extra_args` that vLLM reads and that have fields of their own, where their types are checked. An
# engine with a KV connector calls methods of what it finds there.
_FIELDS_OF_THEIR_OWN = frozenset({"kv_transfer_params", "ec_transfer_params"})

# Headers that vLLM's frontend reads as such a field (`entrypoints/generate/base/serving.py` of
# 0.32.0, read 2026-11-24).
_HEADERS = {
    b"x-vllm-priority": OpenField.PRIORITY,
    b"x-data-parallel-rank": OpenField.DATA_PARALLEL_RANK,
}
# In which a client says when it needs the first token; llm-d's gateways and load tests use it too.
TTFT_HEADER = b"x-slo-ttft-ms"
_MOST_TTFT_MS = 3_600_000
_NEUTRAL: tuple[object, ...] = (None, 0, False, {}, [])
_NEUTRAL_HEADERS = (b"", b"0")

# How a number begins in JSON.
_NUMBERS = frozenset(bytes((each,)) for each in b"-0123456789")
# What a pooling model takes several of.
_INPUTS = ("input", "documents", "queries", "items", "text_1", "text_2", "data_1", "data_2")


# What is judged for the engines of one model, as text, because most bodies have none of it.
_JudgedFields = msgspec.defstruct(
    "_JudgedFields", [(name, msgspec.Raw, _ABSENT) for name in BODY_FIELDS]
)


class RequestFields(_JudgedFields):  # type: ignore[misc, valid-type]
    """The fields of one body, as they came. A field is `None`, or empty text, if it is not there.

    All of `BODY_FIELDS` are among them.

    OpenAI's `user`, or Anthropic's within `metadata`, names its user. What may be long is text
    still: whoever counts its items reads no deeper.
    """

    model: str | None = None
    user: Any = None
    metadata: Any = None
    request_id: Any = None

    # What multiplies a request.
    n: Any = None
    prompt: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    queries: msgspec.Raw = _ABSENT
    items: msgspec.Raw = _ABSENT
    text_1: msgspec.Raw = _ABSENT
    text_2: msgspec.Raw = _ABSENT
    data_1: msgspec.Raw = _ABSENT
    data_2: msgspec.Raw = _ABSENT

    service_tier: Any = None
    stream: Any = None

    structured_outputs: Any = None
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    echo: Any = None

    # What steers engines.
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    priority: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None

    def user_id(self) -> str | None:
        """Returns the user of the request; `None` if it names nobody."""
        of_metadata = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        named = (name for name in (self.user, of_metadata) if isinstance(name, str) and name)
        return next(named, None)


_READER = msgspec.json.Decoder(RequestFields)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def num_values(body: bytes) -> int:
    """Returns the objects and lists of a body at most: those within texts are counted too."""
    return body.count(b"{") + body.count(b"[")


def num_names(body: bytes) -> int:
    """Returns the names in a body's objects at most: colons within texts are counted too."""
    return body.count(b":")


def is_large(path: str, body: bytes) -> bool:
    """Returns whether a body for this route is read in a fork."""
    if len(body) > LARGE_BYTES:
        return True
    most = LARGE_VALUES_OF.get(path, LARGE_VALUES)
    # A value has two bytes at least, and a name with its own has four.
    return (len(body) > 2 * most and num_values(body) > most) or (
        len(body) > 4 * LARGE_NAMES and num_names(body) > LARGE_NAMES
    )


def judge_fields(path: str, fields: RequestFields, rules: BodyRules) -> JudgedBody:
    """Returns what the edge has to know of a body, whichever model it is for.

    Raises:
        MalformedRequestError: no engine should see it. The client must change it.
    """
    check_request_id(fields.request_id)
    check_shapes(fields)
    # First what nobody may set, because its refusal says more.
    check_open_arguments(fields.vllm_xargs)
    check_steering(fields, rules.open_fields)
    if path in GENERATE_ROUTES:
        check_sequences(fields, rules.max_sequences)
    elif path not in ENGINELESS_ROUTES:
        check_inputs(fields, rules.max_inputs)
    tier = asked_tier(fields.service_tier)
    is_stream = fields.stream is True and path in GENERATE_ROUTES
    return JudgedBody(fields.model, fields.user_id(), has_own_template(fields), tier, is_stream)


def asked_tier(value: object) -> ServiceTier | None:
    """Returns the tier that a body's `service_tier` asks for; `None` if it asks for none.

    Raises:
        MalformedRequestError: there is no such tier. The client must name another, or none.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, str):
            raise ValueError(f"it is {kind_of(value)}; allowed: {', '.join(TIERS_ASKED)}")
        return tier_asked(value)
    except ValueError as error:
        raise MalformedRequestError(f"service_tier: {error}", param="service_tier") from None


def asked_ttft_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Returns in how many seconds the first token has to come, by its header; `None` without one.

    Raises:
        MalformedRequestError: it is no number of milliseconds. The client must send another, or
            none.
    """
    for name, value in headers:
        if name != TTFT_HEADER:
            continue
        text = value.decode("latin-1").strip()
        with contextlib.suppress(ValueError):
            if 0 < (milliseconds := float(text)) <= _MOST_TTFT_MS:
                return milliseconds / 1000
        shown = TTFT_HEADER.decode()
        raise MalformedRequestError(
            f"{shown}: {text[:40]!r}; allowed: milliseconds, more than 0 and at most "
            f"{_MOST_TTFT_MS:,}",
            param=shown,
        )
    return None


def check_shapes(fields: RequestFields) -> None:
    """Refuses fields of a shape that vLLM's own reading fails at, instead of refusing it.

    Raises:
        MalformedRequestError: `structured_outputs` is no object, or an item of `input` has no text
            where vLLM takes one. The client must change it.
    """
    # vLLM 0.32.0 looks into it before it has looked at its type: 500 (run 2026-11-24).
    if not isinstance(fields.structured_outputs, dict | None):
        raise MalformedRequestError(
            f"structured_outputs: it is {kind_of(fields.structured_outputs)}; allowed: an object",
            param="structured_outputs",
        )
    if bytes(memoryview(fields.input)[:64]).replace(b" ", b"").startswith(b"[{"):
        # What cannot be read is for vLLM to refuse.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            _check_items(msgspec.json.decode(fields.input))


def _check_items(items: object) -> None:
    # vLLM 0.32.0 takes the text of the first part of an answer that is sent back, and looks neither
    # for a part nor for a text: 500 (run 2026-11-24).
    for at, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict) or item.get("role") != "assistant":
            continue
        parts = item.get("content")
        first = parts[0] if isinstance(parts, list) and parts else None
        if parts == [] or (isinstance(first, dict) and first.get("type") == "refusal"):
            raise MalformedRequestError(
                f"input[{at}].content: it begins with no text; allowed: an answer's text first",
                param="input",
            )


def read_fields(body: bytes) -> RequestFields:
    """Returns the fields of a body.

    Raises:
        MalformedRequestError: it is no JSON object, or `model` is no text.
    """
    try:
        return _READER.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedRequestError(f"model: {error}", param="model") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedRequestError(f"The body is not valid JSON: {error}") from error


# -- what an engine cannot honour, or no client may set --


class BodyJudge:
    """Judges the fields of bodies for the engines of one model."""

    def __init__(self, facts: EngineFacts) -> None:
        self._elsewhere = body_rules(facts)
        self._by_route = {path: {**unread_rules(path), **self._elsewhere} for path in UNREAD}

    def names(self, path: str) -> Iterable[str]:
        """Returns the fields to look at in a body for the route `path`."""
        return self._by_route.get(path, self._elsewhere)

    def check(self, path: str, name: str, value: object) -> None:
        """Refuses `value` of the field `name`, as JSON has it, unless it is neutral.

        Raises:
            MalformedRequestError: engines do not honour it, or the route does not read it. The
                client must change the request.
        """
        rule = self._by_route.get(path, self._elsewhere)[name]
        if not rule.passes(value):
            raise rule.refuse(value)

    def refuses(self, name: str) -> bool:
        """Returns whether engines honour no value of the field `name` but neutral ones."""
        return name in self._elsewhere

    def refuse(self, name: str, asked_by: str) -> MalformedRequestError:
        """Returns the refusal of another field, `asked_by`, that asks for `name` in its way."""
        return MalformedRequestError(
            f"{asked_by}: it asks for {name}; {self._elsewhere[name].reason}. "
            "Allowed: leave it out.",
            param=asked_by,
            code="unsupported_parameter",
        )


def check_fields(fields: RequestFields, judge: BodyJudge, path: str) -> None:
    """Refuses a body in which a field has a value that the engines of a model do not honour.

    So does it where the route `path` does not read the field.

    Raises:
        MalformedRequestError: a field has one. The client must change the request.
    """
    for name in judge.names(path):
        if getattr(fields, name):  # most bodies have none of them
            judge.check(path, name, _value(fields, name))
    if judge.refuses(_PROMPT_LOGPROBS) and _echoes_logprobs(fields, path):
        raise judge.refuse(_PROMPT_LOGPROBS, asked_by=_ECHO)


def check_record(record: object, rules: Iterable[ValueRule]) -> None:
    """Refuses a record of vLLM's in which a field has a value that engines do not honour.

    Raises:
        MalformedRequestError: one has. The client must change the request.
    """
    for rule in rules:
        value = getattr(record, rule.name)
        # Most are as the record has them by itself. Only plain values may be compared at once.
        is_default = type(value) is type(rule.default) and value == rule.default
        if not is_default and not rule.passes(value):
            raise rule.refuse(value)


def _echoes_logprobs(fields: RequestFields, path: str) -> bool:
    """Returns whether vLLM adds prompt log-probabilities; in a chat it does for every echo."""
    if not fields.echo:
        return False
    return path == ModelRoute.CHAT_COMPLETIONS or _value(fields, "logprobs") is not None


def _value(fields: RequestFields, name: str) -> object:
    value = getattr(fields, name)
    if not isinstance(value, msgspec.Raw):
        return value
    if not value:
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedRequestError(f"{name}: it is not valid JSON: {error}", param=name) from error


def check_open_arguments(arguments: object) -> None:
    """Refuses a request's `vllm_xargs` if they hold an argument that clients may not set.

    A value that is no mapping passes, because vLLM reports the fault.

    Raises:
        MalformedRequestError: they hold such an argument. The client must leave it out.
    """
    for name in arguments if isinstance(arguments, dict) else ():
        if str(name).startswith(RESERVED_ARG_PREFIX):
            allowed = f"names that begin with {RESERVED_ARG_PREFIX} are not for clients"
        elif name in _FIELDS_OF_THEIR_OWN:
            allowed = "it is a field of the request itself"
        else:
            continue
        message = f"vllm_xargs: {str(name)[:80]!r} cannot be set here: {allowed}; leave it out."
        raise MalformedRequestError(message, param="vllm_xargs", code="unsupported_parameter")


def has_own_template(fields: RequestFields) -> bool:
    """Returns whether a request brings a chat template, which is a program of its client's."""
    is_there = bytes(fields.chat_template) not in (b"", b"null")
    return is_there or b"chat_template" in bytes(fields.chat_template_kwargs)


def check_request_id(request_id: object) -> None:
    """Refuses a body's `request_id` that is unfit to be logged, echoed and sent with every token.

    A value that is no text passes, because vLLM reports the fault.

    Raises:
        MalformedRequestError: the id is unfit. The client must send another, or none.
    """
    if isinstance(request_id, str) and not REQUEST_ID.fullmatch(request_id):
        message = (
            f"request_id: {request_id[:40]!r} has {len(request_id)} characters; allowed: 1 to 128 "
            "letters, digits and . _ : -"
        )
        raise MalformedRequestError(message, param="request_id")


# -- what steers engines: closed unless the configuration opens it --


def check_steering(fields: RequestFields, opened: Collection[str]) -> None:
    """Refuses a body in which a field has a value that is neither neutral nor of an opened field.

    Raises:
        MalformedRequestError: there is one. The client must leave it out.
    """
    field = steered({field: getattr(fields, field, None) for field in OpenField}, opened)
    if field is not None:
        raise _closed(field, field)


def passed_headers(
    headers: Iterable[tuple[bytes, bytes]], opened: Collection[str]
) -> list[tuple[bytes, bytes]]:
    """Returns the headers without those that steer an engine and are closed.

    Raises:
        MalformedRequestError: one of them has a value. The client must leave it out.
    """
    passed = []
    for name, value in headers:
        field = _HEADERS.get(name)
        if field is None or field in opened:
            passed.append((name, value))
        elif value.strip() not in _NEUTRAL_HEADERS:
            raise _closed(name.decode("latin-1"), field)
    return passed


def steered(made: Mapping[OpenField, object], opened: Collection[str]) -> OpenField | None:
    """Returns the first field of a request that is closed and has a value; `None` if none has."""
    return next(
        (name for name, value in made.items() if name not in opened and value not in _NEUTRAL), None
    )


def _closed(name: str, field: str) -> MalformedRequestError:
    message = (
        f"{name} steers engines and is closed here; leave it out. "
        f"An operator opens it with {field} in gateway.open_fields, or for one key."
    )
    return MalformedRequestError(message, param=name, code="unsupported_parameter")


# -- how much one request may ask for --


def check_sequences(fields: RequestFields, most: int) -> None:
    """Refuses a request for more than `most` answers: `n` times its prompts.

    Raises:
        MalformedRequestError: it asks for more. The client must divide it.
    """
    num_prompts = max(1, _num_items(fields.prompt), _num_items(fields.prompt_embeds))
    asked = _as_number(fields.n) * num_prompts
    if asked > most:
        of_prompts = f" of {num_prompts:,} prompts" if num_prompts > 1 else ""
        raise MalformedRequestError(
            f"n: {asked:,} answers{of_prompts} in one request; allowed: at most {most:,}. "
            "Divide the request.",
            param="n" if _as_number(fields.n) > 1 else "prompt",
        )


def check_inputs(fields: RequestFields, most: int) -> None:
    """Refuses a request with more than `most` inputs to a pooling model.

    Raises:
        MalformedRequestError: it has more. The client must divide it.
    """
    for name in _INPUTS:
        count = _num_items(getattr(fields, name))
        if count > most:
            raise MalformedRequestError(
                f"{name}: {count:,} inputs in one request; allowed: at most {most:,}. "
                "Divide the request.",
                param=name,
            )


def _num_items(raw: msgspec.Raw) -> int:
    """Returns how many prompts or inputs a value holds. Numbers are the tokens of one."""
    # Only the beginning is looked at where that is enough: a prompt may have megabytes.
    head = bytes(memoryview(raw)[:64])
    if not head.startswith(b"["):
        return 1 if head else 0
    if head[1:].lstrip()[:1] in _NUMBERS:
        return 1
    items = _ITEMS.decode(raw)
    is_tokens = bool(items) and bytes(items[0])[:1] in _NUMBERS
    return 1 if is_tokens else len(items)


def _as_number(n: object) -> int:
    """Returns `n` as vLLM reads it, texts and whole floats included; 1 for what it refuses."""
    try:
        return max(1, int(n))  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        return 1
