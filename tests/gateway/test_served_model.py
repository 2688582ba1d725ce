"""Who is let in to a served model: on the shipped model's configuration, with engines by hand."""

import pytest

from serving.config.application import GatewayConfig, ModelConfig
from serving.domain.errors import GatewayBehindError
from serving.gateway.refused_fields import ON_TPU, ON_TPU_WITHOUT_PROMPT_LOGPROBS
from serving.gateway.served_model import ServedModel

from .engines import ScriptedLink, core_request

pytestmark = pytest.mark.imports_vllm

MODEL = ModelConfig.model_validate(
    {
        "name": "demo",
        "source": "models/slicewise-demo",
        "engine": "paced",
        "deployments": ({"compute_class": "local"},),
    }
)


async def test_gateway_that_is_late_refuses_until_it_has_caught_up() -> None:
    # Whatever nobody has taken is later than this.
    served = await ServedModel.build(MODEL, GatewayConfig(max_behind_s=1e-9))
    link = ScriptedLink(served.core)
    await served.admit()
    await served.core.add_request_async(core_request("r", 5))
    link.step()
    with pytest.raises(GatewayBehindError, match="behind with the tokens of 'demo'"):
        await served.admit()
    await served.core.get_output_async()
    await served.admit()
    served.llm.shutdown()


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
    served = await ServedModel.build(model, GatewayConfig())
    assert served.llm.model_config.max_model_len == 512
    assert served.refused_fields is refused
    served.llm.shutdown()
