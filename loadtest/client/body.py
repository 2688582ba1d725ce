"""Builds the body of a planned request, and keeps the conversation of its session so far.

Owns the OpenAI fields. Does not own the making of prompts (`workload.prompts`) nor sending. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from loadtest.client.http_client import Exchange, OutgoingRequest
from loadtest.planned_request import Api, PlannedRequest, PromptBlock

_PATHS = {Api.CHAT: "/v1/chat/completions", Api.COMPLETIONS: "/v1/completions"}
_ENCODER = msgspec.json.Encoder()


class Prompts(Protocol):
    """Makes prompts of blocks: equal blocks are equal tokens, in every process."""

    def token_ids(self, model: str, blocks: Sequence[PromptBlock]) -> list[int]:
        """Returns exactly the blocks' tokens."""

    def chat_text(self, model: str, blocks: Sequence[PromptBlock]) -> str:
        """Returns a user's message of the blocks' tokens, including what the chat template adds."""


@dataclass(slots=True)
class Conversation:
    """The messages of a session before its next turn. `num_tokens` is the planned count."""

    messages: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Makes the requests of a run.

    `wants_token_ids` asks for the tokens of every answer, for a check; the turns of a session ask
    for them anyway, as they are a part of the next prompt.
    """

    prompts: Prompts
    wants_token_ids: bool

    def make(self, planned_request: PlannedRequest, so_far: Conversation | None) -> OutgoingRequest:
        """The request made ready; its prompt is added to `so_far`, the session's (`None`: none)."""
        keeps_content = self.wants_token_ids or so_far is not None
        body: dict[str, object] = {
            "model": planned_request.model,
            "max_tokens": planned_request.output_tokens,
            # Exactly as many tokens as planned, and the same ones each time.
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if keeps_content:
            body["return_token_ids"] = True
        if planned_request.priority:  # servers without priorities refuse one
            body["priority"] = planned_request.priority
        if planned_request.tenant is not None:
            body["user"] = planned_request.tenant
        so_far = Conversation() if so_far is None else so_far
        token_ids: tuple[int, ...] | None = None
        if planned_request.api == Api.CHAT:
            body["messages"] = self._messages(planned_request, so_far)
        elif planned_request.text is not None:
            body["prompt"] = planned_request.text
        else:
            token_ids = self._prompt(planned_request, so_far)
            body["prompt"] = token_ids
        return OutgoingRequest(
            path=_PATHS[planned_request.api],
            body=_ENCODER.encode(body),
            headers={"x-request-id": planned_request.request_id},
            keeps_content=keeps_content,
            prompt_token_ids=token_ids,
        )

    def add_answer(
        self, planned_request: PlannedRequest, so_far: Conversation, exchange: Exchange
    ) -> None:
        """Adds the answer to the conversation; as many others stand for tokens not reported."""
        so_far.num_tokens += planned_request.output_tokens
        if planned_request.api == Api.CHAT:
            so_far.messages.append({"role": "assistant", "content": exchange.answer.text})
            return
        stand_in = PromptBlock(
            f"{planned_request.request_id}/answer", planned_request.output_tokens
        )
        so_far.token_ids += exchange.answer.token_ids or self.prompts.token_ids(
            planned_request.model, [stand_in]
        )

    def _messages(
        self, planned_request: PlannedRequest, so_far: Conversation
    ) -> list[dict[str, str]]:
        text = planned_request.text
        if text is None:
            text = self.prompts.chat_text(planned_request.model, planned_request.blocks)
        so_far.messages.append({"role": "user", "content": text})
        so_far.num_tokens += planned_request.input_tokens
        return so_far.messages

    def _prompt(self, planned_request: PlannedRequest, so_far: Conversation) -> tuple[int, ...]:
        so_far.token_ids += self.prompts.token_ids(planned_request.model, planned_request.blocks)
        so_far.num_tokens += planned_request.input_tokens
        return tuple(so_far.token_ids)
