"""The rows of the dispatcher's tables: requests in flight, and engines with their requests.

Pure records, and the decision who is suspected of killing an engine: no clock, no I/O, no vLLM.
`dispatcher` owns the tables and acts.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.gateway.telemetry.request_telemetry import RequestTelemetry
from serving.link.client import LinkStats
from serving.link.messages import EngineEnd, EngineLoad, Step, TokenRequest

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


@dataclass(slots=True)
class InFlightRequest:
    """The state of one request between the frontend and the fleet.

    `engine_id` is `None` while the request waits for an engine. `attempt` numbers the dispatches,
    so that the outputs of a lost engine can be distinguished from those of the present one. The
    request is on the account of `tenant`.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int | None
    payload: list[bytes]
    telemetry: RequestTelemetry
    is_resumable: bool = True
    tenant: str = ""
    emitted: list[int] = field(default_factory=list)
    engine_id: str | None = None
    attempt: int = 0
    num_emitted_at_dispatch: int = 0
    dispatched_at_s: float = 0.0
    num_losses: int = 0
    num_silent_losses: int = 0
    waiting_since_s: float | None = None
    is_isolated: bool = False
    # The fields that forbid tokens besides the request's grammar; empty if it has no grammar.
    forbidding_fields: Sequence[str] = ()
    # Sent in place of `payload` once something has been emitted; `None` means `payload` serves.
    resume_payload: list[bytes] | None = None

    @property
    def wire_id(self) -> str:
        """The request's id on the link: one per attempt, so that attempts cannot be mistaken."""
        return self.request_id if self.attempt == 0 else f"{self.request_id}~{self.attempt}"

    def to_message(self) -> TokenRequest:
        """Returns the request as it stands now: whole at first, resumed later."""
        is_resumed = bool(self.emitted) and self.resume_payload is not None
        return TokenRequest(
            request_id=self.wire_id,
            prompt_token_ids=self.prompt_token_ids,
            emitted_token_ids=list(self.emitted),
            max_tokens=self.max_tokens,
            tenant=self.tenant,
            payload=(self.resume_payload if is_resumed else self.payload) or [],
            traceparent=self.telemetry.traceparent,
        )

    @property
    def num_tokens_since_dispatch(self) -> int:
        """The tokens that this attempt has produced."""
        return len(self.emitted) - self.num_emitted_at_dispatch

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

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        """Sets the receiver of the engine's steps."""
        ...

    def submit(self, request: TokenRequest) -> None:
        """Sends one request; raises `LinkClosedError` or, when it is too large, `FrameError`."""
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
    load: EngineLoad | None = None
    slice_name: str | None = None  # `None` where the engine owns none

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
