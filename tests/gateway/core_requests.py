"""Requests as vLLM's frontend hands them over."""

import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def core_request(
    request_id: str = "r", max_tokens: int = 5, prompt: list[int] | None = None, **params: Any
) -> EngineCoreRequest:
    """A request as vLLM's frontend hands it over."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(request_id.encode()) if prompt is None else prompt,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
