"""What others have published for a model on chips: how it is started, what it then carries. Pure.

Nothing of it was measured by us, and no figure transfers from one release of tpu-inference to
another. Each has its source. A recipe is for one load, mostly one without common beginnings: it
switches prefix caching off, and takes fp8 for the cache or the weights, which changes answers. So
no engine takes anything of it by itself: `slicewise engine-plan` shows it beside the plan, and what
is wanted of it is set by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

_RECIPES = "AI-Hypercomputer/tpu-recipes"
# Read 2026-11-22.
_CI = "lower bound of tpu-inference's CI, tpu-inference 0.32.0 .buildkite"

# Weights of all linear layers in fp8, quantised as they are loaded.
FP8_EVERYWHERE = {
    "quantization": {
        "qwix": {
            "rules": [
                {
                    "module_path": ".*",
                    "weight_qtype": "float8_e4m3fn",
                    "act_qtype": "float8_e4m3fn",
                }
            ]
        }
    }
}


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """Requests per second of one engine, on so many chips; `model` ends a Hugging Face id."""

    model: str
    generation: str
    num_chips: int
    requests_per_s: float
    input_tokens: int = 1800
    output_tokens: int = 128
    # Users who wait for their answers: enough that the engine is never short of work.
    concurrency: int = 128
    source: str = _CI

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Output tokens per second and chip, if every answer has the published length."""
        return self.requests_per_s * self.output_tokens / self.num_chips


@dataclass(frozen=True, slots=True)
class PublishedThroughput:
    """Output tokens per second and chip, at so many requests at once."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    tokens_per_s_per_chip: float
    source: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is started on one slice; `model` ends a Hugging Face id.

    `args` are vLLM's engine arguments, `env` variables of the engine, as far as they say how fast
    it is or what fits. `topology` is as GKE has it.
    """

    model: str
    generation: str
    topology: str
    num_chips: int
    args: Mapping[str, object]
    source: str
    env: Mapping[str, str] = field(default_factory=dict)
    throughput: tuple[PublishedThroughput, ...] = ()


_Published = TypeVar("_Published", PublishedFigure, Recipe)

FIGURES = (
    PublishedFigure("Llama-3.1-8B-Instruct", "v6e", 1, 10.77),
    PublishedFigure("Llama-3.3-70B-Instruct", "v6e", 8, 7.0),
    PublishedFigure("Qwen3-32B", "v6e", 8, 12.46),
    PublishedFigure("Qwen3-30B-A3B", "v6e", 8, 7.20),
    PublishedFigure("Qwen3-4B", "v6e", 1, 11.0),
)


def _trillium(tensor: int, num_seqs: int, num_batched: int) -> dict[str, object]:
    return {
        "tensor_parallel_size": tensor,
        "max_model_len": 4096,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_batched,
        "gpu_memory_utilization": 0.98,
    }


# Its Llama 3.1 is the same architecture as 3.3.
_LLAMA = f"{_RECIPES} 51a4773, inference/trillium/vLLM/Llama3.1, read 2026-11-27"
_LLAMA_70B = f"{_RECIPES} c8cfe2f, Llama-3.3-70B on v6e-8, 2025-12-10"
_QWEN = f"{_RECIPES} 51a4773, inference/trillium/vLLM/Qwen3, read 2026-11-27"
_QWEN_32B_7X = f"{_RECIPES} 5d34c17 and 6374419, inference/ironwood/vLLM/Qwen3-32B, read 2026-11-27"
_CODER = f"{_RECIPES} 3146f0e, inference/ironwood/vLLM/Qwen3-Coder-480B-A35B, read 2026-11-27"
_CODER_BF16 = f"{_RECIPES} 4332b60, inference/trillium/vLLM/Qwen3-Coder-480B, read 2026-11-27"

RECIPES = (
    Recipe("Llama-3.1-8B-Instruct", "v6e", "1x1", 1, _trillium(1, 128, 1024), _LLAMA),
    Recipe("Llama-3.1-70B-Instruct", "v6e", "2x4", 8, _trillium(8, 256, 2048), _LLAMA),
    Recipe(
        "Llama-3.3-70B-Instruct",
        "v6e",
        "2x4",
        8,
        _trillium(8, 256, 2048),
        _LLAMA,
        throughput=(
            PublishedThroughput(1000, 1000, 64, 311.9, _LLAMA_70B),
            PublishedThroughput(1000, 1000, 128, 443.1, _LLAMA_70B),
        ),
    ),
    Recipe("Qwen3-4B", "v6e", "1x1", 1, _trillium(1, 128, 1024), _QWEN),
    Recipe("Qwen3-32B", "v6e", "2x2", 4, _trillium(4, 256, 2048), _QWEN),
    Recipe(
        "Qwen3-32B",
        "tpu7x",
        "1x1x1",  # which Ray 2.60 reserves no slices of
        1,
        {
            "tensor_parallel_size": 2,
            "max_model_len": 9216,
            "max_num_seqs": 135,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.98,
            "block_size": 256,
            "kv_cache_dtype": "fp8",
            "additional_config": FP8_EVERYWHERE,
        },
        _QWEN_32B_7X,
        {"USE_BATCHED_RPA_KERNEL": "1", "LAYOUT_Q_PROJ_AS_NDH": "1"},
        (
            PublishedThroughput(1024, 1024, 320, 6556.72, _QWEN_32B_7X),
            PublishedThroughput(1024, 8192, 320, 3959.56, _QWEN_32B_7X),
            PublishedThroughput(8192, 1024, 320, 1382.18, _QWEN_32B_7X),
        ),
    ),
    Recipe(
        "Qwen3-Coder-480B-A35B-Instruct-FP8",
        "tpu7x",
        "2x2x1",
        4,
        {
            "tensor_parallel_size": 8,
            "max_model_len": 10240,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.8,
            "block_size": 256,
            "kv_cache_dtype": "fp8",
            "enable_expert_parallel": True,
        },
        _CODER,
        {"USE_BATCHED_RPA_KERNEL": "1", "MODEL_IMPL_TYPE": "vllm"},
        (
            PublishedThroughput(1024, 1024, 64, 479.76, _CODER),
            PublishedThroughput(1024, 8192, 64, 500.66, _CODER),
            PublishedThroughput(8192, 1024, 64, 242.0, _CODER),
        ),
    ),
    Recipe(
        "Qwen3-Coder-480B-A35B-Instruct",
        "tpu7x",
        "2x2x2",
        8,
        {
            "tensor_parallel_size": 16,
            "max_model_len": 4096,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.93,
            "kv_cache_dtype": "fp8",
            "enable_expert_parallel": True,
        },
        _CODER_BF16,
        {"MODEL_IMPL_TYPE": "vllm"},
    ),
)


def published_for(source: str, generation: str, num_chips: int) -> PublishedFigure | str:
    """Returns the figure for a model on one slice, or why none holds."""
    return _found("figure", FIGURES, source, generation, num_chips)


def recipe_for(source: str, generation: str, num_chips: int) -> Recipe | str:
    """Returns the recipe for a model on one slice, or why none is known."""
    return _found("recipe", RECIPES, source, generation, num_chips)


def _found(
    what: str, published: Sequence[_Published], source: str, generation: str, num_chips: int
) -> _Published | str:
    name = source.rstrip("/").rpartition("/")[2].lower()
    of_model = [each for each in published if each.model.lower() == name]
    for each in of_model:
        if (each.generation, each.num_chips) == (generation, num_chips):
            return each
    if not of_model:
        return f"no {what} known for {source}"
    known = ", ".join(f"{each.num_chips} chips of {each.generation}" for each in of_model)
    return f"no {what} known for {source} on {num_chips} chips of {generation}, only on {known}"
