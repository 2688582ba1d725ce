"""One version of a model: on the shipped model's configuration."""

import pytest

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.model_version import ModelVersion

pytestmark = pytest.mark.imports_vllm


@pytest.mark.parametrize(
    ("more", "without_prompt_logprobs"),
    [
        ({}, False),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 2,
                }
            },
            True,
        ),
    ],
)
async def test_model_on_tpu_is_served_by_a_gateway_without_chips(
    more: dict[str, object], without_prompt_logprobs: bool
) -> None:
    model = ModelConfig.model_validate(
        {
            "name": "demo",
            "source": "models/slicewise-demo",
            "engine": "vllm-tpu",
            # vLLM on a machine without chips refuses these sizes.
            "engine_args": {"tensor_parallel_size": 16, "max_model_len": 512} | more,
            "deployments": (
                {"compute_class": "spot", "slice": {"generation": "v6e", "topology": "4x4"}},
            ),
        }
    )
    served = await ModelVersion.build(model, GatewayConfig())
    assert served.llm.model_config.max_model_len == 512
    refuses = served.body_judge.refuses
    assert all(map(refuses, ("seed", "min_p", "bad_words", "allowed_token_ids")))
    assert refuses("prompt_logprobs") is without_prompt_logprobs
    assert not refuses("logprobs")
    served.llm.shutdown()
