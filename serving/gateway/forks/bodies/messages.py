"""What a gateway and its forks tell each other of large bodies. Pure."""

import msgspec

from serving.config.application import OpenField
from serving.domain.models.request_fields.service_class import ServiceTier


class BodyRules(msgspec.Struct, frozen=True):
    """What the edge allows in the body of one request."""

    open_fields: frozenset[OpenField]
    max_sequences: int
    max_inputs: int


class JudgedBody(msgspec.Struct, frozen=True, tag=True):
    """What the edge has to know of a body in which it found no fault.

    `model`, `user_id` and `service_tier` are `None` if the body names none. With a chat template of
    its own it is rendered in a fork, however short it is. It `is_stream` if it asks for one, in the
    plain way; vLLM takes `1` and `"true"` for `true` too.
    """

    model: str | None
    user_id: str | None
    has_own_template: bool = False
    service_tier: ServiceTier | None = None
    is_stream: bool = False


class JudgeOrder(msgspec.Struct, frozen=True):
    """Judge a body for a route."""

    path: str
    body: bytes
    rules: BodyRules


class BodyRefusal(msgspec.Struct, frozen=True, tag=True):
    """The client must change the request: the fields of a `MalformedRequestError`."""

    message: str
    param: str | None
    code: str | None


class PrepareOrder(msgspec.Struct, frozen=True):
    """Do what vLLM does with a request before an engine gets it."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Answered(msgspec.Struct, frozen=True, tag=True):
    """vLLM answered without an engine: a refusal, or what needs none. The answer is whole."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """It is for an engine. `body` is what is left of it.

    `renders` are the results of the renderer in their order, each in a form of `replay`. Without
    `body` the gateway reads it whole: nothing in it takes long.
    """

    body: bytes | None
    renders: list[bytes]
