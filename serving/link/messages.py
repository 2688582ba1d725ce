"""Defines the messages between a gateway and an engine host, and nothing else.

Owns the wire types and their version. Does not own sockets, authentication or any engine type.
Values that only the engine understands (sampling parameters, logprobs) are carried as opaque
`payload` bytes. The two vLLM adapters write and read them, so the link imports no vLLM and a fake
engine needs none.

A frame is a 4-byte big-endian length and one msgpack array, tagged by its first element.
"""

from enum import IntEnum

import msgspec

# Raised on any change that an older peer would misread; a peer with another version is refused.
PROTOCOL_VERSION = 1

# A prompt of a million tokens (5 bytes each) or a step's logprobs fit with room to spare.
MAX_FRAME_BYTES = 64 * 1024 * 1024

# Names that begin so, among the open-ended arguments of a request (vLLM's `vllm_xargs`), belong to
# the two ends of the link. A client that sends one is refused at the HTTP edge; what comes another
# way is left out at either end (`vllm_codec`).
RESERVED_ARG_PREFIX = "slicewise_"


class Finish(IntEnum):
    """The reason for which a request ended, numbered as vLLM numbers it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EngineEnd(IntEnum):
    """The way an engine ended, which decides what its requests are blamed for.

    A crash may be the fault of one of them. An engine that hung, or did not answer in time, says
    less about them; one that was told to end from outside (a signal, its owner) says nothing.
    """

    CRASHED = 0
    HUNG = 1
    TOLD = 2


class TokenRequest(msgspec.Struct, array_like=True, frozen=True, tag="submit"):
    """The message for one sequence to generate (or one prompt to embed), whole or resumed.

    `emitted_token_ids` are output tokens the client already has; the engine continues after them
    and never sends them again. `max_tokens` counts them too; `None` means a pooling request.
    `traceparent` names the request's span at the gateway; `None` when it is not sampled.
    `tenant` is the request's account; empty if nobody is named.
    """

    request_id: str
    prompt_token_ids: list[int]
    emitted_token_ids: list[int] = []
    max_tokens: int | None = None
    payload: list[bytes] = []
    traceparent: str | None = None
    tenant: str = ""


class TokenOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output that one engine step added to one request.

    `finish` is a `Finish` value or `None` while the request goes on. `payload` is `None` unless the
    step carried more than tokens (logprobs, pooling output, first-step statistics). `num_cached`
    comes with the first output of a request: so many of its tokens the engine did not compute,
    because its cache had them; `None` with all others, and where the engine does not say.
    """

    request_id: str
    token_ids: list[int]
    finish: int | None = None
    stop_reason: int | str | None = None
    payload: list[bytes] | None = None
    num_cached: int | None = None


class EngineLoad(msgspec.Struct, array_like=True, frozen=True):
    """The use of an engine's capacity, as of the step or heartbeat it came with."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage_ratio: float = 0.0


class ProgramCounts(msgspec.Struct, array_like=True, frozen=True):
    """Counts the programs that an engine's processes needed, added up over all of its hosts."""

    hits: int = 0  # read from the compile cache
    misses: int = 0  # compiled
    late: int = 0  # of either kind, those that were needed only after the warm-up


class ProgramsMoved(msgspec.Struct, array_like=True):
    """Counts the programs moved between an engine's hosts and the store since its start.

    The numbers cover all hosts. `damaged` programs differ from their manifest in the store or on
    the host's disk, and were not used; `rebuilt` of them have been pushed again. `failures` are
    pulls and pushes that the store or a budget cut short.
    """

    pulled: int = 0
    pulled_bytes: int = 0
    pull_s: float = 0.0
    pushed: int = 0
    pushed_bytes: int = 0
    push_s: float = 0.0
    damaged: int = 0
    rebuilt: int = 0
    failures: int = 0


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's work since its start: sums, so that a message missed loses nothing.

    Tokens are those of all gateways' requests. A feature that the engine lacks (a prefix cache, a
    KV connector, drafts) is `None`. `iteration_counts` has the steps by their tokens, one entry for
    each of `ITERATION_BOUNDS` and one for those beyond. `tenant_tokens` are output tokens by
    tenant, and `tenant_sequences` the engine's present sequences of each. `is_yours` goes to one
    gateway at a time, which then shows the engine's metrics: so they add up over gateways.
    `longest_turn_s` is that of the engine host's event loop (`LoopTurns`).
    `programs` is `None` for an engine that compiles none, `programs_moved` for one that keeps none.
    """

    num_deferred: int = 0  # waiting for something else than room
    num_preemptions: int = 0
    prompt_tokens: int = 0
    local_cached_tokens: int = 0
    external_cached_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0  # in steps
    iteration_tokens: int = 0
    iteration_counts: list[int] = []
    prefix_cache: tuple[int, int] | None = None  # tokens queried, tokens found
    external_prefix_cache: tuple[int, int] | None = None
    drafts: tuple[int, int, int] | None = None  # drafts, their tokens, tokens accepted
    accepted_by_position: list[int] = []
    tenant_tokens: dict[str, int] = {}
    tenant_sequences: dict[str, int] = {}
    is_yours: bool = False
    programs: ProgramCounts | None = None
    programs_moved: ProgramsMoved | None = None
    longest_turn_s: float = 0.0


# The bounds of vLLM's own histogram of tokens per engine step, the same in 0.32.0.
ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Step(msgspec.Struct, array_like=True, omit_defaults=True, tag="step"):
    """The outputs of one engine step that belong to one gateway."""

    outputs: list[TokenOutput]
    load: EngineLoad | None = None


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """The request to stop these requests; unknown ids are ignored. No answer is sent."""

    request_ids: list[str]


class Call(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    """The request for a rare engine operation by name (load an adapter, reset a cache)."""

    call_id: int
    method: str
    args: bytes = b""  # in the caller's own encoding


class Reply(msgspec.Struct, array_like=True, frozen=True, tag="reply"):
    """The answer to a `Call`: `result`, or an `error` message when it failed."""

    call_id: int
    result: bytes = b""
    error: str | None = None


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """The heartbeat of either side; a peer silent for the whole timeout is dead.

    A peer of an earlier build neither sends nor reads the fields after `load`. A `stamp_us` is
    sent back at once as an `echo_us`: a clock of its sender, which means nothing to the other end.
    """

    load: EngineLoad | None = None
    engine_stats: EngineStats | None = None
    stamp_us: int | None = None
    echo_us: int | None = None


class Draining(msgspec.Struct, array_like=True, frozen=True, tag="draining"):
    """The notice that the engine takes no more: requests end in `grace_s` or go on elsewhere."""

    reason: str
    grace_s: float = 0.0


class EngineLost(msgspec.Struct, array_like=True, frozen=True, tag="lost"):
    """The notice that the host's engine is gone: its requests have to be resumed elsewhere.

    `end` is an `EngineEnd` value; a peer of an earlier build says of every end that it is a crash.
    """

    reason: str
    end: int = int(EngineEnd.CRASHED)


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The gateway's first frame: its name, and a nonce for the engine host's proof."""

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
    """The notice that the link is open. `engine_info` is the engine's own description (JSON)."""

    engine_info: bytes = b"{}"


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The refusal to open the link, with the reason. Sent instead of `Challenge` or `Welcome`."""

    reason: str


GatewayMessage = Hello | Proof | TokenRequest | Abort | Call | Ping
EngineMessage = Challenge | Welcome | Refused | Step | Reply | Ping | Draining | EngineLost
