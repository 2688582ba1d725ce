"""What is read out of a config.json, against the published sizes of real models."""

from typing import Any

import pytest

from serving.tpu.model_facts import ModelFactsError, model_facts, with_quantization

from .models import (
    CODER_30B,
    CODER_480B,
    CODER_480B_FP8,
    LLAMA_8B,
    LLAMA_70B,
    QWEN_8B,
    QWEN_TINY,
    facts_of,
)

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


# Published on the models' cards, as read 2026-11-21; the cards round to three digits.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        (LLAMA_8B, 8.03e9),
        (LLAMA_70B, 70.6e9),
        (QWEN_8B, 8.2e9),
        (CODER_30B, 30.5e9),
        (CODER_480B, 480e9),
        (CODER_480B_FP8, 480e9),
        (QWEN_TINY, 0.6e9),
    ],
)
def test_parameters_agree_with_the_published_number(name: str, published: float) -> None:
    assert facts_of(name).num_parameters == pytest.approx(published, rel=0.01)


def test_non_embedding_parameters_of_qwen3_8b_agree_with_its_card() -> None:
    facts = facts_of(QWEN_8B)
    rest = facts.num_parameters - 2 * facts.embedding_parameters
    assert rest == pytest.approx(6.95e9, rel=0.01)


def test_tied_embeddings_count_once() -> None:
    untied = model_facts(TINY | {"tie_word_embeddings": False})
    tied = model_facts(TINY | {"tie_word_embeddings": True})
    assert untied.num_parameters - tied.num_parameters == 512 * 64


def test_head_dim_follows_from_the_width_unless_it_is_given() -> None:
    assert model_facts(TINY).head_dim == 16
    assert model_facts(TINY | {"head_dim": 128}).head_dim == 128


def test_multimodal_model_is_read_from_its_decoder() -> None:
    facts = model_facts(
        {"architectures": ["Vision"], "text_config": TINY, "vision_config": {"depth": 2}}
    )
    assert (facts.is_multimodal, facts.num_layers, facts.is_countable) == (True, 2, False)


def test_latent_attention_is_known_and_not_counted() -> None:
    facts = model_facts(TINY | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512})
    assert (facts.is_mla, facts.is_countable) == (True, False)


@pytest.mark.parametrize(
    ("quantization", "bytes_each"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            1.0,
        ),
    ],
)
def test_quantised_weights_have_the_size_of_their_method(
    quantization: dict[str, Any], bytes_each: float
) -> None:
    weights = model_facts(TINY | {"quantization_config": quantization}).weights
    assert weights.linear_bytes == pytest.approx(bytes_each)
    assert weights.other_bytes == 2.0


def test_weights_that_vllm_quantises_itself_shrink_to_a_byte() -> None:
    assert with_quantization(model_facts(TINY).weights, "fp8").linear_bytes == 1.0
    with pytest.raises(ModelFactsError, match="quantised with auto_awq"):
        with_quantization(model_facts(TINY).weights, "auto_awq")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": []}, "names no architecture"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many', not a count"),
        ({"torch_dtype": "int8"}, "dtype int8; known"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method gptq"),
    ],
)
def test_file_that_says_too_little_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFactsError, match=words):
        model_facts(TINY | change)
