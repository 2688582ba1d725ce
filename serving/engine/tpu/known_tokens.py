"""Keeps tokens in flight apart from those that a request is computed again with. Pure.

With asynchronous scheduling tpu-inference notes a zero for the token of the step in flight, and
puts the token there when it has come. A request that left the batch in between, preempted or not
scheduled for a step, keeps the zero, and would go on behind it with other tokens than without. The
scheduler says what it knows of each request that was not in the step before (`all_token_ids`);
vLLM's own runner reads it (its pull request 26385), tpu-inference 0.32.0 does not.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Protocol


class GoingOn(Protocol):
    """What is used of vLLM's `CachedRequestData`."""

    req_ids: list[str]
    num_output_tokens: list[int]
    resumed_req_ids: set[str]
    all_token_ids: dict[str, list[int]]


class StepInFlight(Protocol):
    """What is used of tpu-inference's `AsyncPreResults`."""

    req_ids: list[str]
    discard_sampled_tokens_req_indices: list[int]
    placeholder_req_id_to_index: dict[str, int]


class RequestState(Protocol):
    """What is used of tpu-inference's `CachedRequestState`."""

    output_token_ids: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens its prompt has."""


def restore_known(
    going_on: GoingOn, states: Mapping[str, RequestState], in_batch: Container[str]
) -> Sequence[str]:
    """Puts the known tokens into the state of each request that comes back; returns their names.

    To be called before the batch takes the step up. Tokens that are still in flight, behind those
    that are known, stay as they are.
    """
    restored = []
    for name, num_output in zip(going_on.req_ids, going_on.num_output_tokens, strict=True):
        known = going_on.all_token_ids.get(name)
        if known is None or (name in in_batch and name not in going_on.resumed_req_ids):
            continue
        state = states[name]
        emitted = known[state.num_prompt_tokens :][:num_output]
        if state.output_token_ids[: len(emitted)] != emitted:
            state.output_token_ids[: len(emitted)] = emitted
            restored.append(name)
    return restored


def forget_unsampled(in_flight: StepInFlight | None) -> None:
    """Takes requests out of the step in flight that it has only computed a part of.

    With guesses tpu-inference 0.32.0 leaves all in. The next part of a request that is computed
    again, behind its prompt, would have sampled tokens put in the place of its own, or, being more
    than guesses can be, ends the engine.
    """
    if in_flight is None:
        return
    for row in in_flight.discard_sampled_tokens_req_indices:
        in_flight.placeholder_req_id_to_index.pop(in_flight.req_ids[row], None)
