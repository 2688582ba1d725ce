"""The memory of one device: by hand for known models, and by what must hold for all."""

import pytest

from serving.domain.topology import GIB, slice_shape
from serving.tpu.hbm import (
    MemoryRequirements,
    Sharding,
    hbm_budget,
    kv_bytes_per_token,
    usable_hbm_bytes,
    weight_bytes,
)

from .models import CODER_30B, LLAMA_8B, LLAMA_70B, QWEN_8B, QWEN_TINY, facts_of

WISH = MemoryRequirements(
    max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048, utilization=0.9
)


# A row is layers x (key and value) x heads x lanes x bytes, padded to 32-bit words.
@pytest.mark.parametrize(
    ("name", "sharding", "dtype", "expected"),
    [
        pytest.param(LLAMA_8B, Sharding(1), "auto", 32 * 2 * 8 * 128 * 2, id="whole"),
        pytest.param(LLAMA_8B, Sharding(4), "auto", 32 * 2 * 2 * 128 * 2, id="two heads each"),
        pytest.param(LLAMA_70B, Sharding(16), "auto", 80 * 2 * 1 * 128 * 2, id="heads repeated"),
        pytest.param(LLAMA_70B, Sharding(4, 2), "auto", 40 * 2 * 2 * 128 * 2, id="two stages"),
        pytest.param(LLAMA_8B, Sharding(4), "fp8", 32 * 2 * 2 * 128, id="fp8"),
        pytest.param(LLAMA_8B, Sharding(8), "fp8", 32 * 4 * 128, id="fp8 of one head is padded"),
        pytest.param(LLAMA_70B, Sharding(16, 1, 2), "auto", 80 * 2 * 128 * 2, id="two groups"),
    ],
)
def test_cache_of_one_token_on_one_device(
    name: str, sharding: Sharding, dtype: str, expected: int
) -> None:
    assert kv_bytes_per_token(facts_of(name), sharding, dtype) == expected


def test_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype int3; known: auto"):
        kv_bytes_per_token(facts_of(LLAMA_8B), Sharding(1), "int3")


@pytest.mark.parametrize("name", [LLAMA_8B, LLAMA_70B, QWEN_8B, CODER_30B, QWEN_TINY])
def test_one_device_holds_all_weights_once(name: str) -> None:
    facts = facts_of(name)
    assert weight_bytes(facts, Sharding(1)) == 2 * facts.num_parameters


@pytest.mark.parametrize("name", [LLAMA_8B, QWEN_8B])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_shards_without_repeated_heads_hold_little_more_than_their_part(
    name: str, tensor: int
) -> None:
    facts = facts_of(name)
    share = weight_bytes(facts, Sharding(tensor)) * tensor
    # Norms are on every shard; nothing else is.
    assert 2 * facts.num_parameters <= share < 2 * facts.num_parameters * 1.001


def test_repeated_heads_cost_their_projections() -> None:
    facts = facts_of(LLAMA_70B)
    at_16 = weight_bytes(facts, Sharding(16)) * 16
    repeated = 2 * 80 * 8 * facts.kv_parameters_per_head
    norms = 15 * 2 * (80 * facts.other_parameters + facts.hidden_size)
    assert at_16 - weight_bytes(facts, Sharding(1)) == repeated + norms


def test_attention_groups_repeat_the_attention_and_not_the_mlp() -> None:
    facts = facts_of(LLAMA_70B)
    grouped = weight_bytes(facts, Sharding(8, 1, 2)) - weight_bytes(facts, Sharding(8))
    attention = 80 * (facts.q_parameters + 8 * facts.kv_parameters_per_head)
    assert grouped == pytest.approx(2 * attention / 8, rel=0.01)


def test_fullest_stage_of_a_pipeline_has_one_end_of_the_model() -> None:
    facts = facts_of(LLAMA_8B)
    half = (2 * facts.num_parameters - 2 * 2 * facts.embedding_parameters) / 2
    expected = half + 2 * facts.embedding_parameters
    assert weight_bytes(facts, Sharding(1, 2)) == pytest.approx(expected, rel=1e-4)


def test_groups_add_up_in_the_cache_and_not_in_one_sequence() -> None:
    shape = slice_shape("v6e", "2x4")
    budget = hbm_budget(facts_of(LLAMA_8B), shape, Sharding(8, 1, 2), WISH)
    assert budget.tokens_per_group == budget.cache_bytes // budget.kv_bytes_per_token
    assert budget.cache_tokens == 2 * budget.tokens_per_group


def test_joined_slices_hold_the_weights_each_and_add_up_in_the_cache() -> None:
    shape, facts = slice_shape("v6e", "2x2"), facts_of(LLAMA_8B)
    alone = hbm_budget(facts, shape, Sharding(4), WISH)
    joined = hbm_budget(facts, shape, Sharding(4, copies=2), WISH)
    assert joined.weights_bytes == alone.weights_bytes
    assert joined.tokens_per_group == alone.tokens_per_group
    assert joined.cache_tokens == 2 * alone.cache_tokens


def test_parts_of_the_budget_are_the_whole_memory() -> None:
    budget = hbm_budget(facts_of(LLAMA_8B), slice_shape("v6e", "2x2"), Sharding(4), WISH)
    parts = budget.weights_bytes + budget.cache_bytes + budget.reserve_bytes
    assert parts == budget.hbm_bytes == int(31.25 * GIB)


def test_weights_that_are_too_large_leave_no_cache_and_say_so() -> None:
    budget = hbm_budget(facts_of(LLAMA_70B), slice_shape("v6e", "2x2"), Sharding(4), WISH)
    assert (budget.fits, budget.tokens_per_group) == (False, 0)
    assert "weights of 32.86 GiB a device" in budget.complaints[0]


def test_step_that_outgrows_its_reserve_does_not_fit() -> None:
    requirements = MemoryRequirements(8192, 2048, 65536, 0.97)
    budget = hbm_budget(facts_of(QWEN_8B), slice_shape("v5e", "2x4"), Sharding(8), requirements)
    assert not budget.fits
    assert "gpu_memory_utilization leaves" in " ".join(budget.complaints)


@pytest.mark.parametrize(
    ("generation", "topology", "gib"),
    [
        ("v5e", "2x2", 15.75),
        ("v6e", "2x2", 31.25),
        ("v5p", "2x2x1", 95),
        ("tpu7x", "2x2x1", 96),
        ("v4", "2x2x1", 32),
    ],
)
def test_usable_memory_of_a_device(generation: str, topology: str, gib: float) -> None:
    assert usable_hbm_bytes(slice_shape(generation, topology)) == gib * GIB
