"""vLLM's engine on CPU finds in its cache what a paced engine with as many blocks finds."""

import pytest
from vllm.sampling_params import SamplingParams

from serving.link.messages import TokenRequest

from .cache_hits import LONGEST_ANSWER, LONGEST_PROMPT, Conversations, found_by, found_by_paced
from .vllm_requests import RequestMaker, set_engine_environment, start_demo_engine

pytestmark = pytest.mark.starts_engine

BLOCK_SIZE = 32


# Room for one request and a little more; for some of all beginnings; for all of them.
@pytest.mark.parametrize(
    "num_blocks",
    [20, pytest.param(60, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.long)],
)
async def test_500_requests_find_as_much(num_blocks: int) -> None:
    set_engine_environment()
    conversations = Conversations(num_blocks, (300, 900))
    maker = RequestMaker()

    def make(name: str, prompt: list[int], num_tokens: int) -> TokenRequest:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return maker.make(name, prompt, params, [])

    engine = await start_demo_engine(
        block_size=BLOCK_SIZE,
        # One more than we have: vLLM keeps its first block for what is nowhere.
        num_gpu_blocks_override=num_blocks + 1,
        max_model_len=LONGEST_PROMPT + LONGEST_ANSWER,
    )
    try:
        found = [each async for each in found_by(engine, conversations, make)]
    finally:
        await engine.close()
    assert found == list(found_by_paced(conversations, num_blocks, BLOCK_SIZE))
    assert sum(found) > 0
