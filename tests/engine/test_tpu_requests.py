"""Requests as tpu-inference takes them: what a client asked for still comes back."""

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from serving.engine.tpu.requests import fit_to_tpu
from tests.gateway.core_requests import core_request

pytestmark = pytest.mark.imports_vllm

# tpu-inference gives the chosen token's log-probability and those of this many likeliest ones,
# however few were asked for (vLLM's `max_logprobs`).
NUM_LIKELIEST = 20


def as_tpu_inference_answers(params: SamplingParams) -> LogprobsLists | None:
    """One token's log-probabilities: none for 0 and for `None`, as seen on JAX CPU."""
    if not params.logprobs:
        return None
    token_ids = np.arange(NUM_LIKELIEST + 1)[None]
    values = -np.arange(1, NUM_LIKELIEST + 2, dtype=np.float32)[None]
    return LogprobsLists(token_ids, values, np.array([3]))


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_client_gets_as_many_logprobs_as_it_asked_for(asked: int) -> None:
    request = core_request(logprobs=asked)
    assert request.sampling_params is not None
    at_frontend = LogprobsProcessor.from_new_request(None, request)
    at_engine = request.sampling_params.clone()
    fit_to_tpu(at_engine)
    answer = as_tpu_inference_answers(at_engine)
    assert answer is not None, "the frontend waits for log-probabilities and fails without"
    output = EngineCoreOutput("r", [0], new_logprobs=answer)
    at_frontend.update_from_output(output)
    assert at_frontend.logprobs is not None
    (of_token,) = at_frontend.logprobs
    assert list(of_token) == list(range(asked + 1))
    assert of_token[0].logprob == -1.0
    assert at_frontend.cumulative_logprob == -1.0


@pytest.mark.parametrize("asked", [None, 1, 5])
def test_request_that_a_tpu_takes_is_left_alone(asked: int | None) -> None:
    params = SamplingParams(logprobs=asked, prompt_logprobs=0, temperature=0.5)
    before = repr(params)
    fit_to_tpu(params)
    assert repr(params) == before


@pytest.mark.parametrize("field", ["allowed_token_ids", "logprob_token_ids"])
def test_request_that_would_end_the_engine_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="engines on TPU"):
        fit_to_tpu(SamplingParams(**{field: [5, 6]}))
