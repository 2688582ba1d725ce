"""Adapts requests to tpu-inference, where it supports less than vLLM or reads a field otherwise.

Owns the changes to a client's request for an engine on TPU, such that the client still gets its
answer, and the refusal of requests that would end the engine. The edge refuses the same fields
first, by `domain.models.request_fields`. Pure.

Source: the wheel of tpu-inference 0.32.0, read and run on JAX CPU 2026-11-22.
"""

from typing import Protocol


class SamplingChoices(Protocol):
    """The parts of vLLM's `SamplingParams` that this module reads."""

    logprobs: int | None
    allowed_token_ids: list[int] | None
    logprob_token_ids: list[int] | None


def fit_to_tpu(params: SamplingChoices) -> None:
    """Changes `params` in place so that a TPU gives the same answer.

    With `logprobs` of 0 vLLM gives the log-probability of the chosen token alone; tpu-inference
    takes 0 for none (`layers/jax/sample/sampling_metadata.py`). So 0 becomes 1, for which it gives
    the chosen token's and then the likeliest one's. The frontend knows the client's number and
    shows as many as that.

    Raises:
        ValueError: the parameters would end the engine. Refuse the request; no other engine of its
            kind would do better.
    """
    if params.allowed_token_ids:
        raise ValueError("engines on TPU cannot restrict the tokens of a request")
    if params.logprob_token_ids:
        raise ValueError("engines on TPU have log-probabilities of the likeliest tokens only")
    if params.logprobs == 0:
        params.logprobs = 1
