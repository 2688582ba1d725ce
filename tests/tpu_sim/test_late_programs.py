"""After the whole warm-up no request waits for a program to be compiled, whatever its shape."""

import random
from pathlib import Path

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from serving.engine.vllm.engine import COMPILATIONS_CALL, VllmEngine
from serving.link.messages import TokenRequest

from .engines import answers, request, running_engine, simulation_environment
from .evidence import Evidence
from .tiny_models import LLAMA, TinyModels

pytestmark = [
    pytest.mark.tpu_sim,
    pytest.mark.filterwarnings("default"),  # the engine core is forked, see test_parity
]

NUM_ROUNDS = 6
MAX_PROMPT_TOKENS = 200


def mixed_requests(draw: random.Random, number: int) -> list[TokenRequest]:
    """One to sixteen at once, short and long, greedy and drawn, some with logprobs or penalties."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 8},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    )
    requests = []
    for at in range(draw.randint(1, 16)):
        prompt = [draw.randrange(5, 300) for _ in range(draw.randint(1, MAX_PROMPT_TOKENS))]
        params = SamplingParams(
            max_tokens=draw.randint(1, 24), ignore_eos=True, **draw.choice(kinds)
        )
        requests.append(request(f"{number}-{at}", prompt, params))
    return requests


async def late_programs(engine: VllmEngine) -> int:
    """Programs that were compiled or looked up after the warm-up, by all hosts."""
    counts: list[int] = msgspec.msgpack.decode(await engine.call(COMPILATIONS_CALL, b""))
    return sum(counts)


async def test_mixed_load_compiles_nothing_after_the_warm_up(
    models: TinyModels, tmp_path: Path, evidence: Evidence
) -> None:
    environment = simulation_environment(tmp_path, 1)
    # As on a TPU host: all shapes are compiled before a request is taken. With bfloat16, because
    # tpu-inference takes it for granted there.
    environment["SKIP_JAX_PRECOMPILE"] = "0"
    draw = random.Random(7)
    num_requests = 0
    async with running_engine(
        models.path(LLAMA), environment, dtype="bfloat16", max_num_seqs=16
    ) as engine:
        warmed_up = engine.engine_stats.programs
        assert warmed_up is not None
        for number in range(NUM_ROUNDS):
            requests = mixed_requests(draw, number)
            await answers(engine, requests)
            num_requests += len(requests)
        assert await late_programs(engine) == 0
    num_programs = warmed_up.hits + warmed_up.misses
    evidence.placed(
        f"after the warm-up, which needed {num_programs} programs, {num_requests} requests of "
        f"mixed shapes compiled none"
    )
