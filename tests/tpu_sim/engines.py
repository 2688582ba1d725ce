"""Engines of tpu-inference on CPU devices, started as the engine host starts them."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serving.engine.vllm.engine import VllmEngine
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import encode_request

from .tiny_models import NUM_NEW_TOKENS

START_S = 600.0
ANSWER_S = 120.0
# Small steps: the longest prompts take three of them, beside others' single tokens.
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
# Features that are tried alone and under kills.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
OFFLOAD = {"kv_connector": "TPUOffloadConnector"}
# Otherwise what experts give is rounded to bfloat16 where a chip has no SparseCore.
IN_FLOAT32 = {"ONEHOT_MOE_PERMUTE_THRESHOLD": "4096"}


def simulation_environment(caches: Path, num_devices: int) -> dict[str, str]:
    """What every process of a simulated TPU host has. `caches` keeps compiled programs."""
    return {
        "SLICEWISE_TPU_SIM": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        # Without the first two a cloud's metadata server is asked.
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "TPU_NAME": "simulated",
        "TPU_WORKER_ID": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_XLA_CACHE_PATH": str(caches / "xla"),
        # A worker that is warm need not be timed here; each start would compile for minutes.
        "SKIP_JAX_PRECOMPILE": "1",
    }


def namespaced_environment(caches: Path, num_devices: int) -> dict[str, str]:
    """The same for a host that knows its own slice, rank and shape."""
    own = {"TPU_ACCELERATOR_TYPE", "TPU_NAME", "TPU_WORKER_ID"}
    environment = simulation_environment(caches, num_devices)
    return {name: value for name, value in environment.items() if name not in own}


@asynccontextmanager
async def running_engine(
    model: str,
    environment: Mapping[str, str],
    adapters: Sequence[tuple[str, str]] = (),
    **engine_args: Any,
) -> AsyncIterator[VllmEngine]:
    """An engine in processes of its own, with this environment, and adapters by name and folder."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        async with asyncio.timeout(START_S):
            engine = await VllmEngine.start(model, ENGINE_ARGS | engine_args, adapters)
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        os.environ.clear()
        os.environ.update(before)


def greedy(max_tokens: int = NUM_NEW_TOKENS, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)


def request(
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    emitted: list[int] | None = None,
    lora: LoRARequest | None = None,
) -> TokenRequest:
    """A request as a gateway sends it."""
    core_request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )
    payload = encode_request(core_request, MsgpackEncoder())
    return TokenRequest(request_id, prompt, emitted or [], params.max_tokens, payload)


async def answers(engine: VllmEngine, requests: list[TokenRequest]) -> list[list[int]]:
    """All at once; the tokens of each."""
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    open_ids = set(tokens)
    async with asyncio.timeout(ANSWER_S):
        for each in requests:
            await engine.submit(each)
        while open_ids:
            for output in await engine.next_step():
                tokens[output.request_id] += output.token_ids
                if output.finish is not None:
                    open_ids.discard(output.request_id)
    return list(tokens.values())
