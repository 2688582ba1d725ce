"""Defines the messages between a gateway and an engine host, and nothing else.

Owns the wire types and their version. Does not own sockets, authentication or any engine type.
Values that only the engine understands (sampling parameters, logprobs) are carried as opaque
`payload` bytes. The two vLLM adapters write and read them, so the link imports no vLLM and a fake
engine needs none.

A frame is a 4-byte big-endian length and one msgpack array, tagged by its first element.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.tokens.block_hashes import BlockContext

# Raised on any change that an older peer would misread; a peer with another version is refused.
PROTOCOL_VERSION = 1

# A prompt of a million tokens (5 bytes each) or a step's logprobs fit with room to spare.
MAX_FRAME_BYTES = 64 * 1024 * 1024

# Names that begin so, among the open-ended arguments of a request (vLLM's `vllm_xargs`), belong to
# the two ends of the link. A client that sends one is refused at the HTTP edge; what comes another
# way is left out at either end (`vllm_codec`).
RESERVED_ARG_PREFIX = "slicewise_"


# Of the class of what goes before all lines.
BEFORE_ALL_CLASSES = -1

Seconds = Annotated[float, msgspec.Meta(gt=0.0)]
# A tenant's share of engines is in proportion to it.
TenantWeight = Annotated[float, msgspec.Meta(gt=0.0)]


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
    `tenant` is the request's account; empty if nobody is named. It has a share of the engine by its
    `weight`, among others of its `service_class`. `work` is what its gateway charged it, in tokens
    of prompts: 0 for one that was charged before, or where the gateway is of an earlier build.
    `batch_id` is the batch that it is a line of; empty for any other request.
    `block_context` is what its blocks in a prefix cache depend on besides tokens, for engines that
    do not read the payload; `None` means nothing, or nothing that the gateway knows.
    `expected_keys` are those blocks of its tokens that the engine will have cached by it, as far as
    its gateway knows of none there; `joined`, for the other gateways.
    """

    request_id: str
    prompt_token_ids: list[int]
    emitted_token_ids: list[int] = []
    max_tokens: int | None = None
    payload: list[bytes] = []
    traceparent: str | None = None
    tenant: str = ""
    service_class: int = int(ServiceClass.STANDARD)
    weight: TenantWeight = 1.0
    work: float = 0.0
    block_context: BlockContext | None = None
    batch_id: str = ""
    expected_keys: bytes = b""


class TokenOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output that one engine step added to one request.

    `finish` is a `Finish` value or `None` while the request goes on. `payload` is `None` unless the
    step carried more than tokens (logprobs, pooling output, first-step statistics). `num_cached`
    comes with the first output of a request, and not again where that is resumed: so many of its
    tokens the engine did not compute, because its cache had them; `None` with all others, and where
    the engine does not say.
    """

    request_id: str
    token_ids: list[int]
    finish: int | None = None
    stop_reason: int | str | None = None
    payload: list[bytes] | None = None
    num_cached: int | None = None


class EngineLoad(msgspec.Struct, array_like=True, frozen=True):
    """The use of an engine's capacity, as of the step or heartbeat it came with.

    `backlog_tokens` are those that have to be computed before the sequences they belong to can go
    on: prompts in line, and what resumed ones had emitted. What the cache may have of those that
    have not begun is guessed, by `computed_ratio`: the share of such tokens, 0 to 1, that the
    engine lately had to compute.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage_ratio: float = 0.0
    backlog_tokens: int = 0
    computed_ratio: float = 1.0


class Room(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway may send to an engine now, and what the engine has.

    It counts the first `num_taken` requests that this gateway has sent over the link; those behind
    them take from it. `num_requests` more may come. The one that takes the last of the
    `prefill_tokens` may take more than are left: a prompt longer than a step has to begin somehow.
    `kv_tokens` are free for prompts and outputs of all gateways; `None` if they are not bounded.
    Prompt tokens take `computed_ratio` of their number, as the engine's cache lately had the rest.
    `num_sequences` and `backlog_tokens` are those of all gateways. `num_places` are free for
    sequences, whether or not the line of prompts has room for one.

    The first `num_dealt` of the requests may be anybody's, those behind them are kept for others
    than batch work, if `is_batch_leaving`, and the accounts of `leaving`; `None` if nothing is.
    The last `num_for_moved` of the requests may only be some that were on an engine before: with
    them the engine has more than keep the objective for later tokens.

    `to_yield` are batch work of this gateway, by their ids, which it is to take back for others.
    `num_batch_of_others` is batch work that it may have taken back by a `MakeWay`; `num_ways_over`
    of those that it has sent are answered: the request has left the engine, or there was none.
    """

    num_taken: int
    num_requests: int
    prefill_tokens: int
    kv_tokens: int | None = None
    num_sequences: int = 0
    backlog_tokens: int = 0
    computed_ratio: float = 1.0
    num_places: int = 0
    num_dealt: int | None = None
    is_batch_leaving: bool = False
    leaving: list[tuple[int, str]] = []
    to_yield: list[str] = []
    num_batch_of_others: int = 0
    num_ways_over: int = 0
    num_for_moved: int = 0


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
    tenant, and `tenant_sequences` the engine's present sequences of each; `batch_tokens` and
    `batch_sequences` are the part of batches in them, by tenant and batch. The tokens of a batch
    that has had nothing here for some minutes are forgotten. `is_yours` goes to one
    gateway at a time, which then shows the engine's metrics: so they add up over gateways.
    `longest_turn_s` is that of the engine host's event loop (`LoopTurns`). The engine may have
    `num_places` sequences, for its steps to be short enough; `None` where nothing is bounded.
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
    batch_tokens: dict[str, dict[str, int]] = {}
    batch_sequences: dict[str, dict[str, int]] = {}
    num_places: int | None = None


# The bounds of vLLM's own histogram of tokens per engine step, the same in 0.32.0.
ITERATION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Step(msgspec.Struct, array_like=True, omit_defaults=True, tag="step"):
    """The outputs of one engine step that belong to one gateway.

    Without outputs it tells of room, which is `None` where the host tells of none.
    """

    outputs: list[TokenOutput]
    load: EngineLoad | None = None
    room: Room | None = None


class WaitingLine(msgspec.Struct, array_like=True, frozen=True):
    """What waits of one tenant in one class; `work` is in tokens of prompts (`tenant_shares`)."""

    service_class: int
    tenant: str
    weight: TenantWeight
    num_requests: int
    prefill_tokens: int
    work: float


class RoomWanted(msgspec.Struct, array_like=True, frozen=True, tag="wanted"):
    """What waits at a gateway for room in any engine of the model: the latest replaces the others.

    The `lines` are of those whose turns come first; what is in none of them comes after all of its
    gateway's. A token of an answer is to take `tpot_s` at most, by the model's objectives; `None`
    if it has none. It goes only to hosts that tell of room (`tells_room` in their description): an
    earlier build does not know it.
    """

    num_requests: int = 0
    prefill_tokens: int = 0
    lines: list[WaitingLine] = []
    tpot_s: Seconds | None = None


class MakeWay(msgspec.Struct, array_like=True, frozen=True, tag="make_way"):
    """The wish that one request of another gateway's batch work leaves the engine.

    It goes only to hosts that have told of such (`Room.num_batch_of_others`): an earlier build does
    not know it.
    """


class WatchCache(msgspec.Struct, array_like=True, frozen=True, tag="watch_cache"):
    """The wish to hear what the engine's prefix cache has, from now on.

    It goes only to hosts whose description has a `cache`: an earlier build does not know it.
    """


class CacheSnapshot(msgspec.Struct, array_like=True, frozen=True, tag="cache_snapshot"):
    """What an engine's prefix cache has now: keys of blocks, one behind the other.

    The first of several takes the place of all that was told before, the others add to it.
    """

    keys: bytes
    is_first: bool


class CacheDelta(msgspec.Struct, array_like=True, frozen=True, tag="cache_delta"):
    """What has come into an engine's prefix cache, and what has gone, since the message before."""

    stored: bytes
    removed: bytes


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

    A peer of an earlier build neither sends nor reads the last fields. A `stamp_us` is
    sent back at once as an `echo_us`: a clock of its sender, which means nothing to the other end.
    """

    load: EngineLoad | None = None
    engine_stats: EngineStats | None = None
    stamp_us: int | None = None
    echo_us: int | None = None
    room: Room | None = None


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


GatewayMessage = (
    Hello | Proof | TokenRequest | Abort | Call | Ping | RoomWanted | MakeWay | WatchCache
)
EngineMessage = (
    Challenge
    | Welcome
    | Refused
    | Step
    | Reply
    | Ping
    | Draining
    | EngineLost
    | CacheSnapshot
    | CacheDelta
)
