"""What travels between a gateway and an engine host, and nothing else.

Owns the wire types and their version. Does not own sockets, authentication or any engine type:
what only the engine understands (sampling parameters, logprobs) is carried as opaque `payload`
bytes that the two vLLM adapters write and read, so the link imports no vLLM and a fake engine needs
none.

A frame is a 4-byte big-endian length and one msgpack array, tagged by its first element.
"""

from enum import IntEnum

import msgspec

# Raised on any change that an older peer would misread; a peer with another version is refused.
PROTOCOL_VERSION = 1

# A prompt of a million tokens (5 bytes each) or a step's logprobs fit with room to spare.
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Finish(IntEnum):
    """Why a request ended, numbered as vLLM numbers it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class TokenRequest(msgspec.Struct, array_like=True, frozen=True, tag="submit"):
    """One sequence to generate (or one prompt to embed), whole or resumed.

    `emitted_token_ids` are output tokens the client already has; the engine continues after them
    and never sends them again. `max_tokens` counts them too; `None` means a pooling request.
    """

    request_id: str
    prompt_token_ids: list[int]
    emitted_token_ids: list[int] = []
    max_tokens: int | None = None
    payload: list[bytes] = []


class TokenOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one engine step added to one request.

    `finish` is a `Finish` value or `None` while the request goes on. `payload` is `None` unless the
    step carried more than tokens (logprobs, pooling output, first-step statistics).
    """

    request_id: str
    token_ids: list[int]
    finish: int | None = None
    stop_reason: int | str | None = None
    payload: list[bytes] | None = None


class EngineLoad(msgspec.Struct, array_like=True, frozen=True):
    """How busy an engine is, as of the step or heartbeat it came with."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage_ratio: float = 0.0


class Step(msgspec.Struct, array_like=True, omit_defaults=True, tag="step"):
    """All outputs of one engine step that belong to one gateway."""

    outputs: list[TokenOutput]
    load: EngineLoad | None = None


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Stop these requests; unknown ids are ignored. No answer is sent."""

    request_ids: list[str]


class Call(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    """A rare engine operation by name (load an adapter, reset a cache).

    `args` is in the caller's own encoding.
    """

    call_id: int
    method: str
    args: bytes = b""


class Reply(msgspec.Struct, array_like=True, frozen=True, tag="reply"):
    """The answer to a `Call`: `result`, or `error` in words when it failed."""

    call_id: int
    result: bytes = b""
    error: str | None = None


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Sent by either side every heartbeat; a peer silent for the whole timeout is dead."""

    load: EngineLoad | None = None


class Draining(msgspec.Struct, array_like=True, frozen=True, tag="draining"):
    """The engine takes no more; its requests finish within `grace_s` or are resumed elsewhere."""

    reason: str
    grace_s: float = 0.0


class EngineLost(msgspec.Struct, array_like=True, frozen=True, tag="lost"):
    """The engine behind this host is gone: every request on it has to be resumed elsewhere."""

    reason: str


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """First frame of the gateway: who it is, and a nonce for the engine host's proof."""

    version: int
    gateway_id: str
    nonce: bytes


class Challenge(msgspec.Struct, array_like=True, frozen=True, tag="challenge"):
    """The engine host's answer to `Hello`: its own nonce, and its proof over both."""

    version: int
    engine_id: str
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, array_like=True, frozen=True, tag="proof"):
    """The gateway's proof over both nonces."""

    proof: bytes


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """The link is open. `engine_info` is what the engine says of itself (JSON)."""

    engine_info: bytes = b"{}"


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The link will not open, and why. Sent in place of `Challenge` or `Welcome`."""

    reason: str


GatewayMessage = Hello | Proof | TokenRequest | Abort | Call | Ping
EngineMessage = Challenge | Welcome | Refused | Step | Reply | Ping | Draining | EngineLost
