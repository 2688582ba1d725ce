"""Finds what tpu-inference 0.32.0 cannot load on one sharding, and what would work. Pure.

Source: `models/jax/`, `models/common/model_loader.py` and `utils.py` of its wheel, and a load that
failed (`Failed to convert torch weight`, JAX on CPU), read and run 2026-11-21.
"""

from collections.abc import Iterator

from serving.domain.errors import Problem
from serving.domain.topology import SliceShape, parallelism_choices
from serving.tpu.hbm import Sharding
from serving.tpu.model_facts import ModelFacts
from serving.tpu.requirements import EngineRequirements
from serving.tpu.rules import MODEL_IMPL

# Models whose JAX loader cannot repeat KV heads over more shards than there are heads: observed
# with Qwen3, expected of Qwen2, which is loaded by the same code.
_CANNOT_REPEAT_HEADS = frozenset({"Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Models that MODEL_IMPL_TYPE `auto` loads as torch ones.
AUTO_TORCH = frozenset(
    {
        "GptOssForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Qwen3MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
# Models that it has JAX code for, which `auto` takes for all but those above.
_JAX_MODELS = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "GptOssForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
    }
)


def is_jax_model(requirements: EngineRequirements, facts: ModelFacts, sharding: Sharding) -> bool:
    """Returns whether the model is loaded as a JAX one, and not as a torch one."""
    impl = requirements.env.get(MODEL_IMPL)
    if impl == "vllm" or requirements.has_lora or needs_torch_model(facts, sharding):
        return False
    return impl == "flax_nnx" or facts.architecture in _JAX_MODELS - AUTO_TORCH


def shards_more_than_heads(facts: ModelFacts, sharding: Sharding) -> bool:
    """Returns whether each KV head is held by several shards."""
    return sharding.attention_shards > facts.num_kv_heads


def needs_torch_model(facts: ModelFacts, sharding: Sharding) -> bool:
    """Returns whether the JAX model exists and cannot be loaded on this sharding."""
    return facts.architecture in _CANNOT_REPEAT_HEADS and shards_more_than_heads(facts, sharding)


def model_problems(
    path: str, requirements: EngineRequirements, facts: ModelFacts, sharding: Sharding
) -> Iterator[Problem]:
    """Yields the problems of this model. `path` is the model's place in the configuration."""
    yield from _head_problems(path, requirements.shape, facts, sharding)
    impl = requirements.env.get(MODEL_IMPL)
    if impl == "flax_nnx" and needs_torch_model(facts, sharding):
        yield Problem(
            f"{path}.engine_env.{MODEL_IMPL}",
            f"the JAX model of {facts.architecture} cannot load {facts.num_kv_heads} KV heads "
            f"over {sharding.attention_shards} shards",
            f"allowed: vllm, or leave it out, or {_fewer_shards(requirements.shape, facts)}",
            impl,
        )
    yield from _quantization_problems(
        path, requirements, facts, is_jax=is_jax_model(requirements, facts, sharding)
    )
    if facts.is_mla and requirements.has_lora:
        yield Problem(
            f"{path}.engine_args.enable_lora",
            f"{facts.architecture} needs attention data parallelism, with which there is no LoRA",
            "allowed: false",
            "true",
        )
    given = requirements.args.get("max_model_len")
    is_longer = isinstance(given, int) and given > facts.max_model_len
    if is_longer and "hf_overrides" not in requirements.args:
        yield Problem(
            f"{path}.engine_args.max_model_len",
            "longer than the model's own context",
            f"allowed: at most {facts.max_model_len}, or a longer one with hf_overrides",
            f"{given}",
        )


def _quantization_problems(
    path: str, requirements: EngineRequirements, facts: ModelFacts, *, is_jax: bool
) -> Iterator[Problem]:
    """Yields what no loader quantises. Source: `layers/*/quantization/fp8.py`, as above."""
    if requirements.args.get("quantization") == "fp8" and facts.weights.method is None:
        if is_jax:
            why = "the JAX models read in config.json how weights are quantised, and end without it"
        elif facts.num_experts:
            why = "the torch models quantise no experts that are stored unquantised"
        else:
            return
        yield Problem(
            f"{path}.engine_args.quantization",
            f"the weights of this checkpoint are stored unquantised: {why}",
            "allowed: leave it out; a checkpoint in fp8; for JAX models qwix in additional_config",
            "fp8",
        )
    if requirements.qwix_rules and not is_jax:
        yield Problem(
            f"{path}.engine_args.additional_config.quantization",
            f"{facts.architecture} is loaded as a torch model here, and those ignore qwix",
            "allowed: leave it out, or a checkpoint that is quantised",
            "qwix",
        )


def _head_problems(
    path: str, shape: SliceShape, facts: ModelFacts, sharding: Sharding
) -> Iterator[Problem]:
    shards = sharding.attention_shards
    counts = {"attention heads": facts.num_heads, "KV heads": facts.num_kv_heads}
    if facts.is_mla:
        del counts["KV heads"]
    odd = [f"{num} {what}" for what, num in counts.items() if num % shards and shards % num]
    if odd:
        yield Problem(
            f"{path}.engine_args.tensor_parallel_size",
            f"{' and '.join(odd)} of {facts.architecture} are not divided by it",
            f"allowed: {_fewer_shards(shape, facts)}",
            f"{sharding.tensor}",
        )


def _fewer_shards(shape: SliceShape, facts: ModelFacts) -> str:
    """Returns, as text, sizes for this slice that divide the heads and repeat none."""
    fitting = [
        f"tensor_parallel_size {tensor} with pipeline_parallel_size {pipeline}"
        for tensor, pipeline in parallelism_choices(shape)
        if facts.num_heads % tensor == 0 and facts.num_kv_heads % tensor == 0
    ]
    if not fitting:
        return f"a slice whose hosts have no more than {facts.num_kv_heads} devices"
    return fitting[0]
