"""The rows of the dispatcher's tables: requests in flight, and engines with their requests.

Pure records, and the decision who is suspected of killing an engine: no clock, no I/O, no vLLM.
`dispatcher` owns the tables and acts.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.tokens.block_hashes import NO_CONTEXT, BlockContext
from serving.domain.tokens.cached_blocks import CacheLayout
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.known_room import KnownRoom, Need
from serving.gateway.telemetry.request_telemetry import RequestTelemetry
from serving.link.client import LinkStats
from serving.link.messages import (
    CacheDelta,
    CacheSnapshot,
    EngineEnd,
    EngineLoad,
    Room,
    RoomWanted,
    Step,
    TokenRequest,
)

# A request that produced this many tokens on an engine is not what killed it: whatever is poisonous
# in a request (its prompt, a grammar, a parameter) acts at its prefill or in its first steps.
PROVING_TOKENS = 8

# A host that falls silent was most likely taken away with its slice, and many are when a class is
# lost; an engine that hangs was most likely slow, or has lost a chip. So this many such losses
# count as one crash. They do count, because a request may also exhaust a whole host, or never let
# go of an engine.
SILENT_LOSSES = 3

# From this many losses on, a request is isolated: at most one such request per engine.
ISOLATION_LOSSES = 2


# Whose work it is: the class of service and the tenant.
Account = tuple[ServiceClass, str]


@dataclass(slots=True)
class InFlightRequest:
    """The state of one request between the frontend and the fleet.

    `engine_id` is `None` while the request waits for an engine. `attempt` numbers the dispatches,
    so that the outputs of a lost engine can be distinguished from those of the present one. The
    request is on the account of `tenant`, whose share of engines is in proportion to `weight`.
    Its client waits `patience_s` for the first token, and has waited for `waited_s` when it comes
    here; `None` means as long as others of its class. So it is due by `first_token_by_s`, of the
    loop's time. While it waits for its first engine it is overdue from `overdue_at_s` on, never
    without an objective. `line_work` is what it is expected to take of an engine, while it waits.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int | None
    payload: list[bytes]
    telemetry: RequestTelemetry
    is_resumable: bool = True
    tenant: str = ""
    batch_id: str = ""  # the batch that it is a line of; empty for any other request
    weight: float = 1.0
    service_class: ServiceClass = ServiceClass.STANDARD
    patience_s: float | None = None
    waited_s: float = 0.0
    first_token_by_s: float = math.inf
    overdue_at_s: float = math.inf
    line_work: float = 0.0
    emitted: list[int] = field(default_factory=list)
    engine_id: str | None = None
    attempt: int = 0
    num_emitted_at_dispatch: int = 0
    dispatched_at_s: float = 0.0
    num_losses: int = 0
    num_silent_losses: int = 0
    num_yields: int = 0  # how often it has left an engine to let others in
    first_token_cost: int = 0  # at its engine, as it was when it went there; see `routing`
    num_taken_back: int = 0  # how often it has left an engine that was late to begin it
    waiting_since_s: float | None = None
    awaited_id: str | None = None  # while it waits for this one engine, see `routing.Route`
    is_isolated: bool = False
    num_cached: int = 0  # tokens of the prompt that were in the cache of its first token's engine
    charged: float | None = None  # work that its tenant was charged for it; `None` before its turn
    # The fields that forbid tokens besides the request's grammar; empty if it has no grammar.
    forbidding_fields: Sequence[str] = ()
    # The blocks of its prompt, and of all that it has emitted once it has moved; `None` if what
    # they are called by engines is not known.
    blocks: NamedBlocks | None = None
    expected_keys: list[bytes] = field(default_factory=list)  # see `CacheIndex.expect`
    beginning: bytes | None = None  # what engines had of it, see `cache_index.Found`
    # Sent in place of `payload` once something has been emitted; `None` means `payload` serves.
    resume_payload: list[bytes] | None = None

    @property
    def account(self) -> Account:
        """Whose work it is."""
        return self.service_class, self.tenant

    @property
    def is_batch(self) -> bool:
        """True for batch work, which is done when there is room."""
        return self.service_class is ServiceClass.BATCH

    @property
    def wire_id(self) -> str:
        """The request's id on the link: one per attempt, so that attempts cannot be mistaken."""
        return self.request_id if self.attempt == 0 else f"{self.request_id}~{self.attempt}"

    def to_message(self, expected_keys: bytes = b"") -> TokenRequest:
        """Returns the request as it stands now: whole at first, resumed later.

        `expected_keys` are as `TokenRequest` has them.
        """
        is_resumed = bool(self.emitted) and self.resume_payload is not None
        return TokenRequest(
            request_id=self.wire_id,
            prompt_token_ids=self.prompt_token_ids,
            emitted_token_ids=list(self.emitted),
            max_tokens=self.max_tokens,
            tenant=self.tenant,
            batch_id=self.batch_id,
            service_class=int(self.service_class),
            weight=self.weight,
            work=(self.charged or 0.0) if self.attempt == 0 else 0.0,
            payload=(self.resume_payload if is_resumed else self.payload) or [],
            traceparent=self.telemetry.traceparent,
            block_context=self._block_context,
            expected_keys=expected_keys,
        )

    @property
    def _block_context(self) -> BlockContext | None:
        context = NO_CONTEXT if self.blocks is None else self.blocks.context
        return None if context == NO_CONTEXT else context

    @property
    def num_tokens(self) -> int:
        """The tokens so far, of prompt and output: an engine has to compute those it has not."""
        return len(self.prompt_token_ids) + len(self.emitted)

    @property
    def num_tokens_since_dispatch(self) -> int:
        """The tokens that this attempt has produced."""
        return len(self.emitted) - self.num_emitted_at_dispatch

    @property
    def is_unbegun(self) -> bool:
        """True if an engine has it, and nothing of it has come from there."""
        return self.engine_id is not None and self.num_tokens_since_dispatch <= 0

    @property
    def is_proven(self) -> bool:
        """True if this attempt has run long enough to be no suspect of killing engines."""
        return self.num_tokens_since_dispatch >= PROVING_TOKENS

    @property
    def needs_isolation(self) -> bool:
        """True if the request may only be dispatched as its engine's one suspect."""
        return self.num_losses >= ISOLATION_LOSSES


def count_loss(lost: Iterable[InFlightRequest], end: EngineEnd | None) -> None:
    """Counts the end of one engine against the requests that were on it.

    `end` is the way in which the host reported that it ended; `None` if it merely fell silent. An
    engine that was told to end counts against nobody. An isolated request takes the blame alone.
    Without one, each request is counted. The count of a proven request starts again from zero.
    """
    if end == EngineEnd.TOLD:
        return
    requests = list(lost)
    suspects = [request for request in requests if request.is_isolated]
    for request in suspects or requests:
        if request.is_proven:
            request.num_losses = request.num_silent_losses = 0
        if end != EngineEnd.CRASHED:
            request.num_silent_losses += 1
            if request.num_silent_losses % SILENT_LOSSES:
                continue
        request.num_losses += 1


class EngineLink(Protocol):
    """The interface of a connection to an engine host."""

    @property
    def reported_end(self) -> EngineEnd | None:
        """The way in which the host has reported that its engine ended.

        `None` before that; and a host that is taken away reports nothing.
        """
        ...

    @property
    def stats(self) -> LinkStats:
        """The traffic of the link, and the host's last report of its engine."""
        ...

    @property
    def late_s(self) -> float:
        """How long a message takes to the engine and back, in seconds; 0 if that is not known."""
        ...

    @property
    def tells_room(self) -> bool:
        """True if the host says what it has room for; nothing is to be sent before it has."""
        ...

    @property
    def cache_layout(self) -> CacheLayout | None:
        """How the engine names the blocks of its prefix cache; `None` if its host does not tell."""
        ...

    def watch_cache(self, on_change: Callable[[CacheSnapshot | CacheDelta], None]) -> None:
        """Has a host that describes a cache tell what it has."""
        ...

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        """Sets the receiver of the engine's steps."""
        ...

    def submit(self, request: TokenRequest) -> None:
        """Sends one request; raises `LinkClosedError` or, when it is too large, `FrameError`."""
        ...

    def want_room(self, wanted: RoomWanted) -> None:
        """Tells what waits for room, to a host that tells of room."""
        ...

    def make_way(self) -> None:
        """Asks for the place of one request of others' batch work, where the host told of some."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Frees these requests; a no-op when the link is closed."""
        ...

    async def call(self, method: str, args: bytes, timeout_s: float) -> bytes:
        """Runs a rare engine operation."""
        ...


@dataclass(slots=True)
class EngineConnection:
    """The record of one connected engine and the requests on it, by wire id."""

    engine_id: str
    compute_class: str
    link: EngineLink
    requests: dict[str, InFlightRequest] = field(default_factory=dict)
    num_dispatched: int = 0
    is_draining: bool = False
    # When the last request has to have left a draining engine; `None` while that is not known.
    migrate_by_s: float | None = None
    last_move: asyncio.TimerHandle | None = None
    # Batch work has just left it, and it has not told of the room yet.
    is_yielding: bool = False
    num_ways_asked: int = 0  # for the places of others' batch work
    last_output_s: float = 0.0  # of the loop's time
    # Since when it stands still, as far as is known, and until when it gets nothing for that.
    still_since_s: float | None = None
    late_until_s: float | None = None
    load: EngineLoad | None = None
    slice_name: str | None = None  # `None` where the engine owns none
    room: KnownRoom | None = None  # `None`: it is given everything
    # Another one after each change of what a choice asks of it, but for `requests`.
    version: int = 0

    def gets(self, request: InFlightRequest, now_s: float) -> None:
        """Notes that a request goes there."""
        request.engine_id = self.engine_id
        request.num_emitted_at_dispatch = len(request.emitted)
        request.dispatched_at_s = now_s
        self.requests[request.wire_id] = request
        self.num_dispatched += 1
        self.version += 1

    def tell_room(self, room: Room) -> None:
        """Takes in the room that its host tells of, if that is known to."""
        if self.room is not None:
            self.room.tell(room)
            self.version += 1

    def takes(self, need: Need) -> None:
        """Counts what a request that is on its way takes of its room."""
        if self.room is not None:
            self.room.sent(need)
            self.version += 1

    def has_no_room(self) -> None:
        """Notes that nothing more is to go there."""
        self.room = self.room or KnownRoom()
        self.room.shut()
        self.version += 1

    def drains(self) -> None:
        """Notes that it takes no more requests."""
        self.is_draining = True
        self.version += 1

    def goes_on(self, now_s: float) -> None:
        """Notes that something has come of it."""
        self.last_output_s = now_s
        if self.still_since_s is not None:
            self.still_since_s = self.late_until_s = None
            self.version += 1

    @property
    def is_making_way(self) -> bool:
        """True while batch work leaves it for what waits here."""
        told = None if self.room is None else self.room.told
        return self.is_yielding or (told is not None and self.num_ways_asked > told.num_ways_over)

    def ask_for_a_way(self) -> None:
        """Has batch work of another gateway leave it."""
        self.num_ways_asked += 1
        self.link.make_way()

    def stands_still(self, since_s: float, now_s: float) -> None:
        """Notes that nothing has come of it since it got a request, at `since_s`.

        It gets no other for as long again: so it is tried ever more rarely.
        """
        if self.still_since_s is None:
            self.still_since_s = since_s
        self.late_until_s = now_s + (now_s - self.still_since_s)
        self.version += 1

    @property
    def computed_ratio(self) -> float:
        """The share of prompt tokens that it lately had to compute, 0 to 1; 1 if it tells none."""
        return 1.0 if self.room is None else self.room.computed_ratio

    @property
    def trace_attributes(self) -> dict[str, str]:
        """The attributes that a span on the engine gets."""
        attributes = {
            "slicewise.engine_id": self.engine_id,
            "slicewise.compute_class": self.compute_class,
        }
        if self.slice_name is not None:
            attributes["slicewise.slice"] = self.slice_name
        return attributes
