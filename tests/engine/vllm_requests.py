"""A real engine with the shipped model, and requests for it made as the gateway makes them."""

import os
from collections.abc import Sequence
from typing import Any

from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from serving.artifacts.model_source import resolve_source
from serving.engine.vllm.engine import VllmEngine, engine_config
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import encode_request

MODEL = resolve_source("models/slicewise-demo")
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.1,
    # The shipped model is small, and would go on with line ends between two keys.
    "structured_outputs_config": {
        "reasoning_parser": "qwen3",
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
}


def set_engine_environment() -> None:
    """What `serve_config.yaml` sets for the engine's processes, and no network."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


async def start_demo_engine(**more: Any) -> VllmEngine:
    return await VllmEngine.start(MODEL, ENGINE_ARGS | more)


async def start_adapted_engine(*adapters: tuple[str, str]) -> VllmEngine:
    """One that may use adapters up to rank 8, one of them in a step."""
    arguments = ENGINE_ARGS | {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 512}
    return await VllmEngine.start(MODEL, arguments, adapters)


class RequestMaker:
    """Makes token requests through vLLM's own input processor."""

    def __init__(self, **more: Any) -> None:
        """Makes them for an engine with the same further arguments."""
        config = engine_config(MODEL, ENGINE_ARGS | more)
        self._renderer = renderer_from_config(config)
        self._inputs = InputProcessor(config, self._renderer)
        self._encoder = MsgpackEncoder()

    def token_ids(self, text: str) -> list[int]:
        return list(self._renderer.tokenizer.encode(text))

    @property
    def eos_token_id(self) -> int:
        return int(self._renderer.get_eos_token_id())

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._renderer.tokenizer.decode(list(token_ids)))

    def make(
        self, request_id: str, prompt: list[int], params: SamplingParams, emitted: list[int]
    ) -> TokenRequest:
        if emitted and params.prompt_logprobs is not None:  # as `FleetEngineClient` does
            params = params.clone()
            params.prompt_logprobs = None
        request = self.core_request(request_id, prompt, params)
        return TokenRequest(
            request_id, prompt, emitted, params.max_tokens, encode_request(request, self._encoder)
        )

    def core_request(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> EngineCoreRequest:
        """The request as vLLM's frontend hands it to the fleet client."""
        return self._inputs.process_inputs(
            request_id, {"prompt_token_ids": prompt}, params.clone(), ("generate",)
        )
