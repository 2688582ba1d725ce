"""Describes one request of a load test before it is sent: when, to whom, how long.

It is the seam between workloads, which make these, and the client, which sends them. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum


class Api(StrEnum):
    """The endpoint of a request."""

    CHAT = "chat"  # /v1/chat/completions
    COMPLETIONS = "completions"  # /v1/completions


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """The run of prompt tokens. Blocks with equal `content_id` and length have equal tokens."""

    content_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """The plan of one request.

    `request_id` is unique in the run and the same for the same workload and seed. `offset_s` is its
    scheduled instant, in seconds after the start of the run; `None` for one that is sent when
    something before it ends: the later turns of a session, `think_time_s` after the turn before,
    and everything of a closed loop. `blocks` are its own prompt, in order; a later turn's prompt is
    the whole conversation so far and then its blocks. `output_tokens` is requested exactly.
    `session_id` is `None` for a request on its own; `turn` counts from 0. `text` is a verbatim
    prompt, which then stands instead of `blocks`.
    """

    request_id: str
    offset_s: float | None
    model: str
    api: Api
    blocks: tuple[PromptBlock, ...]
    output_tokens: int
    session_id: str | None = None
    turn: int = 0
    think_time_s: float = 0.0
    tenant: str | None = None
    priority: int = 0
    text: str | None = None

    @property
    def input_tokens(self) -> int:
        """The tokens of its own blocks."""
        return sum(block.num_tokens for block in self.blocks)
