"""tpu-inference's engine finds in its cache what a paced engine with as many blocks finds."""

from pathlib import Path

import pytest

from serving.link.messages import TokenRequest
from tests.engine.cache_hits import (
    LONGEST_ANSWER,
    LONGEST_PROMPT,
    Conversations,
    found_by,
    found_by_paced,
)

from .engines import greedy, request, running_engine, simulation_environment
from .tiny_models import QWEN3, TinyModels

pytestmark = [pytest.mark.tpu_sim, pytest.mark.filterwarnings("default")]

BLOCK_SIZE = 32


# Room for one request and a little more, and for all of them.
@pytest.mark.parametrize("num_blocks", [20, 1000])
async def test_500_requests_find_as_much(models: TinyModels, caches: Path, num_blocks: int) -> None:
    conversations = Conversations(num_blocks, (3, 250))

    def make(name: str, prompt: list[int], num_tokens: int) -> TokenRequest:
        return request(name, prompt, greedy(num_tokens))

    async with running_engine(
        models.path(QWEN3),
        simulation_environment(caches, 1),
        block_size=BLOCK_SIZE,
        # One more than we have: vLLM keeps its first block for what is nowhere.
        num_gpu_blocks_override=num_blocks + 1,
        max_model_len=LONGEST_PROMPT + LONGEST_ANSWER,
        max_num_batched_tokens=512,
        async_scheduling=False,
    ) as engine:
        found = [each async for each in found_by(engine, conversations, make)]
    assert found == list(found_by_paced(conversations, num_blocks, BLOCK_SIZE))
    assert sum(found) > 0
