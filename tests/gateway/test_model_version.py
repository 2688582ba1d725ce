"""One version of a model: on the shipped model's configuration."""

import pytest

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.edge.fields import ON_TPU, ON_TPU_WITHOUT_PROMPT_LOGPROBS
from serving.gateway.model_version import ModelVersion

pytestmark = pytest.mark.imports_vllm


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, ON_TPU),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 2,
                }
            },
            ON_TPU_WITHOUT_PROMPT_LOGPROBS,
        ),
    ],
)
async def test_model_on_tpu_is_served_by_a_gateway_without_chips(
    more: dict[str, object], refused: object
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
    assert served.refused_fields is refused
    served.llm.shutdown()
