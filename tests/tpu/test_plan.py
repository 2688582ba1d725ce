"""Whether an engine fits, and that every way out that is named is one."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serving.domain.errors import ConfigError
from serving.domain.topology import slice_shape
from serving.tpu.model_facts import model_facts
from serving.tpu.plan import EnginePlan, describe_slice, ensure_fits, plan_engine
from serving.tpu.published import FP8_EVERYWHERE
from serving.tpu.requirements import EngineRequirements

from .models import (
    CODER_30B,
    CODER_480B,
    CODER_480B_FP8,
    LLAMA_8B,
    LLAMA_70B,
    QWEN_8B,
    facts_of,
)


def plan(model: str, generation: str, topology: str, **args: Any) -> EnginePlan:
    requirements = EngineRequirements(model, slice_shape(generation, topology), args)
    return plan_engine(requirements, facts_of(model))


def qwix(rule: dict[str, str]) -> dict[str, Any]:
    return {"additional_config": {"quantization": {"qwix": {"rules": [rule]}}}}


@pytest.mark.parametrize(
    ("model", "generation", "topology", "args", "fits"),
    [
        (LLAMA_8B, "v6e", "2x2", {}, True),
        (LLAMA_8B, "v6e", "1x1", {}, False),
        (LLAMA_8B, "v6e", "1x1", {"max_model_len": 32768}, True),
        (LLAMA_8B, "v5e", "1x1", {"max_model_len": 1024}, False),
        (LLAMA_70B, "v6e", "2x2", {}, False),
        (LLAMA_70B, "v6e", "2x2", {"additional_config": FP8_EVERYWHERE}, True),
        (LLAMA_70B, "v6e", "2x4", {}, True),
        (LLAMA_70B, "v6e", "4x4", {}, True),
        (LLAMA_70B, "v5p", "2x2x2", {}, True),
        (QWEN_8B, "v5e", "2x4", {}, True),
        (CODER_30B, "v6e", "2x2", {"max_model_len": 65536}, True),
        (CODER_480B, "tpu7x", "2x2x1", {}, False),
        (CODER_480B, "tpu7x", "2x2x2", {}, True),
        (CODER_480B_FP8, "tpu7x", "2x2x1", {}, True),
    ],
)
def test_models_fit_where_they_should(
    model: str, generation: str, topology: str, args: dict[str, Any], *, fits: bool
) -> None:
    planned = plan(model, generation, topology, **args)
    assert planned.can_start is fits
    assert bool(planned.advice) is not fits


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    refused = plan(LLAMA_8B, "v6e", "1x1")
    assert refused.advice == (
        "max_model_len 107520",
        f"additional_config {json.dumps(FP8_EVERYWHERE)}",
        "kv_cache_dtype fp8",
        "v6e 2x2 (4 chips, 1 host)",
    )
    with pytest.raises(ValueError, match="does not fit on v6e 1x1: one request") as caught:
        ensure_fits(refused)
    assert "What would fit: max_model_len 107520" in str(caught.value)
    ensure_fits(plan(LLAMA_8B, "v6e", "1x1", max_model_len=107520))


@pytest.mark.parametrize(
    ("model", "args", "env", "words"),
    [
        # tpu-inference 0.32.0 looks for `quant_method` in config.json, and a KeyError is its end.
        (LLAMA_8B, {"quantization": "fp8"}, {}, "the JAX models read in config.json"),
        (LLAMA_8B, {"quantization": "fp8"}, {"MODEL_IMPL_TYPE": "vllm"}, None),
        (CODER_30B, {"quantization": "fp8"}, {}, "quantise no experts that are stored unquantised"),
        (CODER_480B_FP8, {"quantization": "fp8"}, {}, None),
        (CODER_30B, {"additional_config": FP8_EVERYWHERE}, {}, "those ignore qwix"),
        (LLAMA_8B, {"additional_config": FP8_EVERYWHERE, "enable_lora": True}, {}, "ignore qwix"),
        (LLAMA_8B, {"additional_config": FP8_EVERYWHERE}, {}, None),
    ],
)
def test_what_no_loader_quantises_is_refused_by_name(
    model: str, args: dict[str, Any], env: dict[str, str], words: str | None
) -> None:
    shape = slice_shape("tpu7x", "2x2x1") if "480b" in model else slice_shape("v6e", "2x2")
    requirements = EngineRequirements(model, shape, args, env)
    if words is None:
        plan_engine(requirements, facts_of(model))
        return
    with pytest.raises(ConfigError, match=words):
        plan_engine(requirements, facts_of(model))


def test_larger_slice_may_need_stages() -> None:
    # 96 heads are not divided by the 64 devices of 8x8; a stage on each of its 16 hosts is.
    refused = plan(CODER_480B, "v6e", "4x4")
    assert refused.advice[-1] == "v6e 8x8 (64 chips, 16 hosts, pipeline_parallel_size 16)"
    tried = plan(CODER_480B, "v6e", "8x8", tensor_parallel_size=4, pipeline_parallel_size=16)
    assert tried.can_start


def test_larger_slice_forgets_the_sizes_of_the_smaller_one() -> None:
    refused = plan(LLAMA_70B, "v6e", "2x2", tensor_parallel_size=4)
    assert "v6e 2x4 (8 chips, 1 host)" in refused.advice


def test_model_that_is_not_counted_may_start_and_says_that_it_was_not() -> None:
    facts = replace(facts_of(LLAMA_8B), architecture="NewForCausalLM")
    planned = plan_engine(EngineRequirements("m", slice_shape("v6e", "2x2")), facts)
    assert (planned.budget, planned.can_start) == (None, True)
    assert "NewForCausalLM are not counted" in planned.uncounted
    ensure_fits(planned)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype int3"),
        ({"quantization": "modelopt_fp4"}, "quantised with modelopt_fp4"),
        (qwix({"module_path": ".*attn.*", "weight_qtype": "int8"}), "some of the modules"),
        (qwix({"module_path": ".*", "weight_qtype": "nf4"}), "weight_qtype nf4; known: float8"),
    ],
)
def test_sizes_that_are_not_known_are_not_guessed(args: dict[str, Any], words: str) -> None:
    assert words in plan(LLAMA_8B, "v6e", "2x2", **args).uncounted


def test_without_the_models_file_nothing_of_the_model_is_decided() -> None:
    planned = plan_engine(EngineRequirements("m", slice_shape("v6e", "2x2")), None)
    assert planned.can_start
    assert "not at hand" in planned.uncounted
    assert any("no config.json" in note for note in planned.settings.notes)


def test_tiny_model_fits_anywhere() -> None:
    tiny = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 512, "max_position_embeddings": 64}  # fmt: skip
    assert plan_engine(
        EngineRequirements("m", slice_shape("v5e", "1x1")), model_facts(tiny)
    ).can_start


# -- engines that share the slice --


def test_ways_to_divide_a_slice_are_those_whose_parts_fit() -> None:
    """Each is planned as an engine on a slice of that size, sizes set by hand left out."""
    for args in ({}, {"tensor_parallel_size": 8}):
        found = plan(QWEN_8B, "v6e", "2x4", **args).divisions
        assert [(each.num_engines, each.part.topology) for each in found] == [
            (2, "2x2"),
            (8, "1x1"),
        ]
        for each in found:
            alone = plan(QWEN_8B, "v6e", each.part.topology).budget
            assert alone is not None
            assert each.cache_tokens == alone.cache_tokens
    # It does not fit on one chip, and another not on four.
    assert [each.num_engines for each in plan(LLAMA_8B, "v6e", "2x4").divisions] == [2]
    assert plan(LLAMA_70B, "v6e", "2x4").divisions == ()


def test_part_of_a_slice_is_planned_as_a_slice_of_its_size() -> None:
    whole = plan(QWEN_8B, "v6e", "2x2")
    requirements = replace(whole.requirements, num_engines=2)
    part = plan_engine(requirements, facts_of(QWEN_8B))
    assert (part.settings, part.budget) == (whole.settings, whole.budget)
    assert part.divisions == ()
    assert describe_slice(requirements) == "v6e 2x2, one of 2 parts of a slice"
