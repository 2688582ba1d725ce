"""Greedy float32 output of tpu-inference is transformers', token for token, however it is sharded.

The prompts make steps of all kinds: two are longer than a step (chunked prefill) and run beside
the single tokens of others; every later round finds its prompts in the prefix cache.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.lora.request import LoRARequest

from serving.engine.vllm.engine import COMPILATIONS_CALL

from .engines import answers, greedy, request, running_engine, simulation_environment
from .evidence import Evidence
from .tiny_models import LLAMA, QWEN3, TinyModels

pytestmark = [
    pytest.mark.tpu_sim,
    # An engine core is forked from this process and keeps its rules: there, what flax and JAX
    # deprecate must not end a step.
    pytest.mark.filterwarnings("default"),
]

# The first fills the prefix cache. More than one after it, because what goes wrong here by sharing
# memory goes wrong in some runs only.
NUM_ROUNDS = 3
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Shape:
    """How an engine is spread over devices."""

    name: str
    num_devices: int
    engine_args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def tensor(size: int) -> Shape:
    return Shape(f"TP {size}", size, {"tensor_parallel_size": size})


ATTENTION_DP = Shape(
    "attention DP 2, TP 4",
    4,
    {
        "tensor_parallel_size": 4,
        "additional_config": {
            "sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}
        },
    },
    {"NEW_MODEL_DESIGN": "1"},
)
DATA = Shape(
    "DP 2, TP 2",
    4,
    {"tensor_parallel_size": 2, "data_parallel_size": 2},
    {"NEW_MODEL_DESIGN": "1", "TPU_MULTIPROCESS_DP": "0"},
)
PIPELINE = Shape("PP 2, one host", 2, {"pipeline_parallel_size": 2})
SHAPES = [
    (QWEN3, tensor(1)),
    (QWEN3, tensor(2)),
    pytest.param(QWEN3, tensor(4), marks=pytest.mark.quick),
    (LLAMA, tensor(1)),
    (LLAMA, tensor(4)),
    pytest.param(QWEN3, PIPELINE, marks=pytest.mark.quick),
    (LLAMA, ATTENTION_DP),
    (QWEN3, DATA),
]


@pytest.mark.parametrize(("model", "shape"), SHAPES, ids=str)
async def test_outputs_equal_those_of_transformers(
    models: TinyModels, caches: Path, evidence: Evidence, model: str, shape: Shape
) -> None:
    environment = simulation_environment(caches, shape.num_devices) | shape.environment
    prompts, expected = models.prompts[model], models.expected[model]
    async with running_engine(models.path(model), environment, **shape.engine_args) as engine:
        for number in range(NUM_ROUNDS):
            asked = [request(f"{number}-{at}", each, greedy()) for at, each in enumerate(prompts)]
            assert await answers(engine, asked) == expected, f"round {number}"
        engine_stats = engine.engine_stats
    assert engine_stats is not None
    assert engine_stats.prefix_cache is not None
    num_found = engine_stats.prefix_cache[1]
    assert num_found > 0, "no round found its prompts in the prefix cache"
    evidence.parity(
        f"{model}, {shape}",
        f"{shape.num_devices} devices of one host, {num_found} prompt tokens from the prefix cache",
        TRANSFORMERS,
        NUM_ROUNDS * len(prompts),
    )


@pytest.mark.parametrize(
    "shape",
    [pytest.param(tensor(1), marks=pytest.mark.quick), PIPELINE, DATA, ATTENTION_DP],
    ids=str,
)
async def test_a_resumed_request_goes_on_as_if_it_had_never_been_elsewhere(
    models: TinyModels, caches: Path, evidence: Evidence, shape: Shape
) -> None:
    environment = simulation_environment(caches, shape.num_devices) | shape.environment
    prompts, expected = models.prompts[LLAMA], models.expected[LLAMA]
    splits = (1, 2, 9, 17)
    async with running_engine(models.path(LLAMA), environment, **shape.engine_args) as engine:
        for split in splits:
            asked = [
                request(f"{split}-{at}", prompt, greedy(), emitted=expected[at][:split])
                for at, prompt in enumerate(prompts)
            ]
            rest = [each[split:] for each in expected]
            assert await answers(engine, asked) == rest, f"split at {split}"
    evidence.parity(
        f"{LLAMA}, {shape}, requests resumed after {', '.join(map(str, splits))} tokens",
        f"{shape.num_devices} devices of one host",
        TRANSFORMERS,
        len(splits) * len(prompts),
    )


async def test_an_adapter_changes_outputs_as_peft_does(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    # The JAX models know no adapters; torchax runs vLLM's torch model.
    environment = simulation_environment(caches, 1) | {"MODEL_IMPL_TYPE": "vllm"}
    adapter = LoRARequest("adapter", 1, models.adapter)
    engine_args = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    prompts, base = models.prompts[QWEN3], models.expected[QWEN3]
    adapted = models.expected["adapter"]
    assert adapted != base
    adapters = [(adapter.lora_name, adapter.lora_path)]
    async with running_engine(models.path(QWEN3), environment, adapters, **engine_args) as engine:
        asked = [request(f"base-{at}", each, greedy()) for at, each in enumerate(prompts)]
        asked += [
            request(f"adapted-{at}", each, greedy(), lora=adapter)
            for at, each in enumerate(prompts)
        ]
        # In one batch: half of it with the adapter, half without.
        assert await answers(engine, asked) == base + adapted
        split = 9
        resumed = [
            request(f"resumed-{at}", each, greedy(), emitted=adapted[at][:split], lora=adapter)
            for at, each in enumerate(prompts)
        ]
        assert await answers(engine, resumed) == [each[split:] for each in adapted]
    evidence.parity(
        f"{QWEN3} on torchax, half of the batch with an adapter of rank 8; with it also resumed "
        f"after {split} tokens",
        "1 device of one host",
        f"{TRANSFORMERS}, PEFT",
        3 * len(prompts),
    )


async def test_what_is_compiled_for_a_new_shape_is_counted_once_and_told_to_the_host(
    models: TinyModels, caches: Path
) -> None:
    short, long = [7, 8, 9], list(range(10, 210))
    environment = simulation_environment(caches, 1)
    args = {"max_num_batched_tokens": 256}
    async with running_engine(models.path(LLAMA), environment, **args) as engine:

        async def num_compilations() -> int:
            counts: list[int] = msgspec.msgpack.decode(await engine.call(COMPILATIONS_CALL, b""))
            assert len(counts) == 1
            return counts[0]

        async def compiled_for(prompt: list[int]) -> int:
            before = await num_compilations()
            await answers(engine, [request("one", prompt, greedy(4))])
            return await num_compilations() - before

        clock = asyncio.get_running_loop().time
        await compiled_for(short)
        warm_s = clock()
        assert await compiled_for(short) == 0
        assert engine.compiling(warm_s) is None
        # A step of 256 tokens, which nothing has had yet: the warm-up's have 128 at most.
        assert await compiled_for(long) > 0
        assert "jit" in str(engine.compiling(warm_s))
        done_s = clock()
        assert await compiled_for(long) == 0
        assert engine.compiling(done_s) is None
