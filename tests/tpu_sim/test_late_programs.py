"""After the whole warm-up no request waits for a program to be compiled, whatever it asks for."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from serving.engine.vllm.engine import COMPILATIONS_CALL, VllmEngine
from serving.link.messages import TokenRequest

from .engines import answers, request, running_engine, simulation_environment
from .evidence import Evidence
from .grammars import under_grammar
from .test_features import drafting
from .test_parity import ATTENTION_DP, DATA, Shape, tensor
from .tiny_models import DRAFTED, LLAMA, QWEN3, TinyModels

pytestmark = [
    pytest.mark.tpu_sim,
    # The draft may have to be trained first.
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("default"),  # the engine core is forked, see test_parity
]

MAX_PROMPT_TOKENS = 200
NUM_REQUESTS = 300
ADAPTER = "adapter"

PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 8},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
)
PROMPT_LOGPROBS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.8, "prompt_logprobs": 0, "logprobs": 2},
)


@dataclass(frozen=True)
class Load:
    """A model, how it is served, and what is asked of it beside prompts and lengths."""

    name: str
    model: str
    shape: Shape
    kinds: tuple[dict[str, Any], ...]
    engine_args: dict[str, Any] = field(default_factory=dict)
    has_adapter: bool = False
    is_drafted: bool = False

    def __str__(self) -> str:
        return self.name


GRAMMARS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "structured_outputs": under_grammar()},
    {"temperature": 0.9, "structured_outputs": under_grammar(), "logprobs": 1},
)
EVERYTHING = PLAIN + PROMPT_LOGPROBS + GRAMMARS
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
}
ON_TORCHAX = Shape("TP 1 on torchax", 1, environment={"MODEL_IMPL_TYPE": "vllm"})
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
LOADS = [
    Load("TP 1", LLAMA, tensor(1), EVERYTHING),
    Load("TP 4", LLAMA, tensor(4), EVERYTHING),
    # Grammars are refused with data parallelism; they and log-probabilities of prompts with
    # speculation.
    Load("attention DP 2, TP 4", LLAMA, ATTENTION_DP, PLAIN + PROMPT_LOGPROBS),
    Load("adapters", QWEN3, ON_TORCHAX, EVERYTHING, LORA, has_adapter=True),
    Load("speculation", LLAMA, tensor(1), PLAIN, NGRAM),
    Load("DP 2, TP 2", LLAMA, DATA, PLAIN + PROMPT_LOGPROBS),
    Load("EAGLE-3 draft", DRAFTED, tensor(4), PLAIN, is_drafted=True),
]


def mixed_requests(
    draw: random.Random, number: int, load: Load, adapter: LoRARequest | None
) -> list[TokenRequest]:
    """One to sixteen at once, short and long, of all kinds."""
    requests = []
    for at in range(draw.randint(1, 16)):
        prompt = [draw.randrange(5, 300) for _ in range(draw.randint(1, MAX_PROMPT_TOKENS))]
        params = SamplingParams(
            max_tokens=draw.randint(1, 8), ignore_eos=True, **draw.choice(load.kinds)
        )
        lora = adapter if draw.random() < 0.5 else None
        requests.append(request(f"{number}-{at}", prompt, params, lora=lora))
    return requests


async def late_programs(engine: VllmEngine) -> int:
    """Programs that were compiled or looked up after the warm-up, by all hosts."""
    counts: list[int] = msgspec.msgpack.decode(await engine.call(COMPILATIONS_CALL, b""))
    return sum(counts)


@pytest.mark.parametrize("load", LOADS, ids=str)
async def test_mixed_load_compiles_nothing_after_the_warm_up(
    models: TinyModels, tmp_path: Path, evidence: Evidence, load: Load
) -> None:
    environment = simulation_environment(tmp_path, load.shape.num_devices) | load.shape.environment
    # As on a TPU host: all shapes are compiled before a request is taken. With bfloat16, because
    # tpu-inference takes it for granted there.
    environment["SKIP_JAX_PRECOMPILE"] = "0"
    adapter = LoRARequest(ADAPTER, 1, models.adapter) if load.has_adapter else None
    adapters = [(adapter.lora_name, adapter.lora_path)] if adapter else []
    args = {"dtype": "bfloat16", "max_num_seqs": 16} | load.shape.engine_args | load.engine_args
    if load.is_drafted:
        args["speculative_config"] = drafting(models)
    draw = random.Random(7)
    num_requests = num_rounds = 0
    async with running_engine(models.path(load.model), environment, adapters, **args) as engine:
        warmed_up = engine.engine_stats.programs
        assert warmed_up is not None
        while num_requests < NUM_REQUESTS:
            requests = mixed_requests(draw, num_rounds, load, adapter)
            await answers(engine, requests)
            num_requests += len(requests)
            num_rounds += 1
        num_late = await late_programs(engine)
        assert num_late == 0
    num_programs = warmed_up.hits + warmed_up.misses
    evidence.placed(
        f"{load}: after the warm-up, which needed {num_programs} programs, {num_requests} requests "
        f"of mixed shapes compiled {num_late or 'none'}"
    )
