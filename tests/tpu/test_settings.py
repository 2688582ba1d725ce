"""What slices and models turn into, and what is refused with what would work, by table."""

from typing import Any

import pytest

from serving.domain.errors import ConfigError
from serving.domain.topology import parallelism_choices, shapes, slice_shape
from serving.tpu.hbm import Sharding
from serving.tpu.model_facts import ModelFacts, model_facts
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import (
    BY_HAND,
    EngineSettings,
    engine_settings,
    request_buckets,
    token_buckets,
)

from .models import CODER_30B, LLAMA_8B, LLAMA_70B, QWEN_8B, facts_of

ATTENTION_DATA = {"sharding": {"sharding_strategy": {"enable_dp_attention": True}}}


def requirements_of(slice_name: str, **changes: Any) -> EngineRequirements:
    generation, topology, *chips = slice_name.split()
    shape = slice_shape(generation, topology, int(chips[0]) if chips else None)
    return EngineRequirements(**({"model": "org/m", "shape": shape} | changes))


def resolve_settings(slice_name: str, model: str | None, **changes: Any) -> EngineSettings:
    facts = None if model is None else facts_of(model)
    return engine_settings(requirements_of(slice_name, **changes), facts)


def complaint(slice_name: str, facts: ModelFacts | None, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_settings(requirements_of(slice_name, **changes), facts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("slice_name", "model", "args", "sharding", "env"),
    [
        pytest.param("v6e 2x2", LLAMA_8B, {}, Sharding(4), {}, id="one host"),
        pytest.param("v5e 2x4", QWEN_8B, {}, Sharding(8), {}, id="one host of eight"),
        pytest.param("tpu7x 2x2x1", CODER_30B, {}, Sharding(8), {}, id="two devices a chip"),
        pytest.param(
            "v6e 4x4", LLAMA_70B, {}, Sharding(16), {"TPU_MULTIHOST_BACKEND": "ray"}, id="hosts"
        ),
        pytest.param(
            "tpu7x 2x2x2",
            LLAMA_70B,
            {"pipeline_parallel_size": 2},
            Sharding(8, 2),
            {"TPU_MULTIHOST_BACKEND": "ray"},
            id="a stage a host",
        ),
        pytest.param(
            "v5p 2x2x1", LLAMA_70B, {"pipeline_parallel_size": 4}, Sharding(1, 4), {},
            id="a stage a chip",
        ),
        pytest.param(
            "v6e 4x4",
            QWEN_8B,
            {},
            Sharding(16),
            {"TPU_MULTIHOST_BACKEND": "ray", "MODEL_IMPL_TYPE": "vllm"},
            id="Qwen3 over more shards than heads",
        ),
        pytest.param(
            "v6e 2x2",
            LLAMA_8B,
            {"enable_lora": True},
            Sharding(4),
            {"MODEL_IMPL_TYPE": "vllm"},
            id="LoRA",
        ),
        pytest.param(
            "v5e 2x4",
            QWEN_8B,
            {"additional_config": {"sharding": {"sharding_strategy": {
                "enable_dp_attention": True, "attn_dp_size": 2}}}},
            Sharding(8, 1, 2),
            {"NEW_MODEL_DESIGN": "1"},
            id="attention data parallel",
        ),
        pytest.param(
            "v6e 4x4",
            QWEN_8B,
            {"additional_config": ATTENTION_DATA},
            # 8 heads, keys and values packed in pairs: 8 shards repeat none.
            Sharding(16, 1, 2),
            {"TPU_MULTIHOST_BACKEND": "ray", "NEW_MODEL_DESIGN": "1"},
            id="attention data parallel, derived",
        ),
        pytest.param(
            "v5e 2x4",
            QWEN_8B,
            {"decode_context_parallel_size": 2},
            Sharding(8),
            {"NEW_MODEL_DESIGN": "1"},
            id="context parallel",
        ),
    ],
)  # fmt: skip
def test_slice_and_model_turn_into_sizes_and_environment(
    slice_name: str, model: str, args: dict[str, Any], sharding: Sharding, env: dict[str, str]
) -> None:
    settings = resolve_settings(slice_name, model, args=args)
    assert settings.sharding == sharding
    ray = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"} if "TPU_MULTIHOST_BACKEND" in env else {}
    assert settings.environment == env | ray
    assert settings.engine_args["tensor_parallel_size"] == sharding.tensor
    assert settings.engine_args["pipeline_parallel_size"] == sharding.pipeline


@pytest.mark.parametrize(
    ("slice_name", "args", "sharding"),
    [
        pytest.param("v6e 2x4", {"data_parallel_size": 2}, Sharding(4, copies=2), id="two"),
        pytest.param(
            "v6e 2x4",
            {"data_parallel_size": 4, "tensor_parallel_size": 2},
            Sharding(2, copies=4),
            id="four, size given",
        ),
        pytest.param(
            "tpu7x 2x2x1", {"data_parallel_size": 4}, Sharding(2, copies=4), id="one a chip"
        ),
    ],
)
def test_copies_of_a_model_share_a_slice(
    slice_name: str, args: dict[str, Any], sharding: Sharding
) -> None:
    settings = resolve_settings(slice_name, LLAMA_8B, args=args)
    assert settings.sharding == sharding
    assert settings.environment == {"NEW_MODEL_DESIGN": "1", "TPU_MULTIPROCESS_DP": "0"}
    assert settings.engine_args["tensor_parallel_size"] == sharding.tensor
    (note,) = [each for each in settings.notes if "copies" in each]
    assert note.startswith(f"each of the {sharding.copies} copies has max_num_seqs")


@pytest.mark.parametrize(
    ("slice_name", "args", "sharding"),
    [
        pytest.param("v6e 2x2", {}, Sharding(4, copies=2), id="hosts alone, joined"),
        pytest.param("v6e 4x4", {}, Sharding(16, copies=2), id="slices of several hosts"),
        pytest.param(
            "v6e 4x4",
            {"additional_config": {"sharding": {"sharding_strategy": {
                "enable_dp_attention": True, "attn_dp_size": 2}}}},
            Sharding(16, 1, 2, 2),
            id="attention data parallel in each",
        ),
    ],
)  # fmt: skip
def test_joined_slices_each_hold_the_model(
    slice_name: str, args: dict[str, Any], sharding: Sharding
) -> None:
    settings = resolve_settings(slice_name, LLAMA_70B, args=args, num_slices=2)
    assert settings.sharding == sharding
    assert settings.environment == {
        "TPU_MULTIHOST_BACKEND": "ray",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
        "NUM_SLICES": "2",
        "TPU_MULTIPROCESS_DP": "0",
        "NEW_MODEL_DESIGN": "1",
    }
    sizes = {name: settings.engine_args[f"{name}_parallel_size"] for name in ("tensor", "data")}
    assert sizes == {"tensor": sharding.tensor, "data": 2}
    assert any("the loss of one ends the engine on all" in note for note in settings.notes)


@pytest.mark.parametrize(
    ("slice_name", "args", "words"),
    [
        ("v6e 4x4", {}, ["over several hosts on tpu7x only"]),
        ("v6e 4x4", {"pipeline_parallel_size": 4}, ["on one host only"]),
        ("v6e 2x4", {"pipeline_parallel_size": 2}, []),
    ],
)
def test_several_hosts_are_noted_with_what_upstream_tests(
    slice_name: str, args: dict[str, Any], words: list[str]
) -> None:
    notes = resolve_settings(slice_name, LLAMA_70B, args=args).notes
    found = [note for note in notes if note.startswith("upstream tests")]
    assert len(found) == len(words)
    assert all(each in note for each, note in zip(words, found, strict=True))


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_sizes_fill_every_slice_there_is(generation: str) -> None:
    for shape in shapes(generation):
        requirements = EngineRequirements(model="m", shape=shape)
        sharding = engine_settings(requirements, None).sharding
        assert (sharding.tensor, sharding.pipeline) in parallelism_choices(shape)


def test_every_setting_says_why() -> None:
    settings = resolve_settings(
        "v6e 4x4", QWEN_8B, compile_cache="/xla", env={"HF_HOME": "/models"}
    )
    assert all(len(setting.reason) > 10 for setting in (*settings.args, *settings.env))
    assert [s.reason for s in settings.env if s.name == "HF_HOME"] == [BY_HAND]


def test_what_is_set_by_hand_stays() -> None:
    args = {"max_model_len": 4096, "max_num_seqs": 32, "gpu_memory_utilization": 0.8}
    settings = resolve_settings(
        "v6e 2x2", LLAMA_8B, args=args | {"seed": 7}, env={"MODEL_IMPL_TYPE": "vllm"}
    )
    chosen = settings.engine_args
    assert {name: chosen[name] for name in args} == args
    assert chosen["seed"] == 7
    assert settings.environment == {"MODEL_IMPL_TYPE": "vllm"}
    assert (settings.memory.max_model_len, settings.memory.utilization) == (4096, 0.8)
    assert settings.request_buckets == (8, 16, 32)


def test_kept_programs_include_those_that_compile_fast() -> None:
    env = resolve_settings("v6e 2x2", LLAMA_8B, compile_cache="/xla").environment
    assert env["VLLM_XLA_CACHE_PATH"] == "/xla"
    assert env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    # Or JAX would find them in this folder only.
    assert env["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] == "none"
    # The guard would fail requests; it belongs into tests.
    assert "VLLM_XLA_CHECK_RECOMPILATION" not in env


def test_latent_attention_gets_attention_data_parallelism() -> None:
    facts = model_facts(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "kv_lora_rank": 512,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
        }
    )
    settings = engine_settings(requirements_of("v6e 2x4"), facts)
    assert settings.engine_args["additional_config"] == ATTENTION_DATA
    assert settings.environment == {"NEW_MODEL_DESIGN": "1"}
    lora = complaint("v6e 2x4", facts, args={"enable_lora": True})
    assert "attention data parallelism, with which there is no LoRA" in lora


def test_multimodal_input_is_not_split() -> None:
    facts = model_facts(
        {
            "architectures": ["Vision"],
            "vision_config": {},
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 9,
                "max_position_embeddings": 64,
            },
        }
    )
    settings = engine_settings(requirements_of("v6e 2x2"), facts)
    assert settings.engine_args["disable_chunked_mm_input"] is True


@pytest.mark.parametrize(
    ("slice_name", "model", "changes", "words"),
    [
        pytest.param(
            "v6e 2x4", QWEN_8B,
            {"args": {"enable_lora": True, "additional_config": ATTENTION_DATA}},
            "no LoRA with attention data parallelism", id="LoRA, attention data",
        ),
        pytest.param(
            "v6e 2x4", QWEN_8B,
            {"args": {"enable_lora": True}, "env": {"MODEL_IMPL_TYPE": "flax_nnx"}},
            "LoRA layers exist in the torch models only", id="LoRA, JAX model",
        ),
        pytest.param(
            "v6e 4x4", QWEN_8B, {"env": {"MODEL_IMPL_TYPE": "flax_nnx"}},
            "cannot load 8 KV heads over 16 shards (value flax_nnx); allowed: vllm, or leave it "
            "out, or tensor_parallel_size 4 with pipeline_parallel_size 4",
            id="Qwen3, JAX model, more shards than heads",
        ),
        pytest.param(
            "v6e 8x8", "odd", {}, "24 attention heads and 6 KV heads", id="heads not divided",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"max_model_len": 262144}},
            "longer than the model's own context (value 262144); allowed: at most 131072",
            id="too long",
        ),
        pytest.param(
            "v6e 2x2", None, {"env": {"TPU_MULTIHOST_BACKEND": "ray"}},
            "it follows from the hosts of the slice", id="owned variable",
        ),
        pytest.param(
            "v6e 2x2", None, {"env": {"MEGASCALE_SLICE_ID": "0"}},
            "use num_slices of the deployment's slice", id="owned prefix",
        ),
        pytest.param(
            "v5p 2x2x2", LLAMA_70B, {"args": {"pipeline_parallel_size": 2}},
            "model.engine_args.pipeline_parallel_size: tpu-inference counts 2 devices for a chip "
            "of v5p, where JAX has 1: a stage of 4 devices would see 2, and its worker ends at "
            "start (value 2); allowed: 1",
            id="stages of v5p hosts",
        ),
        pytest.param(
            "v4 2x2x1", None, {"args": {"pipeline_parallel_size": 2}},
            "a stage of 2 devices would see 1, and its worker ends at start (value 2); "
            "allowed: 1 or 4", id="stages of v4 chips",
        ),
        pytest.param(
            "v5p 2x2x2", None,
            {"args": {"pipeline_parallel_size": 2, "additional_config": {"sharding": {
                "sharding_strategy": {"tensor_parallelism": 4}}}}},
            "a stage of 4 devices would see 2", id="stages of v5p hosts, strategy",
        ),
        pytest.param(
            "v5p 2x2x4", QWEN_8B, {"env": {"MODEL_IMPL_TYPE": "flax_nnx"}},
            "allowed: vllm, or leave it out, or a slice whose hosts have no more than 8 devices",
            id="no stages as a way out",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"enable_lora": True}, "num_slices": 2},
            "no LoRA with data parallelism, which 2 joined slices need (value true); allowed: "
            "false, or num_slices: 1 and more replicas", id="joined, LoRA",
        ),
        pytest.param(
            "v6e 4x4", LLAMA_8B, {"args": {"pipeline_parallel_size": 4}, "num_slices": 2},
            "do not span 2 joined slices (value 4); allowed: 1, or num_slices: 1",
            id="joined, pipeline",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"env": {"NEW_MODEL_DESIGN": "0"}, "num_slices": 2},
            "a mesh in the new model design only", id="joined, old design",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B,
            {"args": {"decode_context_parallel_size": 2}, "num_slices": 2},
            "never seen together with 2 joined slices", id="joined, context parallel",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B,
            {"args": {"additional_config": {"sharding": {"sharding_strategy": {
                "device_indexes": [0]}}}}, "num_slices": 2},
            "allowed: no device_indexes", id="joined, order of devices",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"data_parallel_size": 2}, "num_slices": 2},
            "joined slices hold a copy each already", id="copies, joined",
        ),
        pytest.param(
            "v6e 4x4", LLAMA_8B, {"args": {"data_parallel_size": 2}},
            "copies of a model over several hosts were never run", id="copies, hosts",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"data_parallel_size": 2, "enable_lora": True}},
            "no LoRA with data parallelism", id="copies, adapters",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"data_parallel_size": 2, "pipeline_parallel_size": 2}},
            "its copies have no pipeline stages", id="copies, stages",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B,
            {"args": {"data_parallel_size": 2,
                      "kv_transfer_config": {"kv_connector": "TPUOffloadConnector"}}},
            "does not know of copies", id="copies, host's memory",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"data_parallel_size": 3}},
            "does not divide 4 chips (value 3)", id="copies, odd",
        ),
        pytest.param(
            "tpu7x 2x2x1", LLAMA_8B, {"args": {"data_parallel_size": 8}},
            "so that each copy has whole chips", id="copies, parts of chips",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B, {"args": {"data_parallel_size": 2, "tensor_parallel_size": 4}},
            "2 copies of it are not the 4 devices of the slice (value 4); allowed: 2",
            id="copies, too wide",
        ),
        pytest.param(
            "v6e 2x2", LLAMA_8B,
            {"args": {"data_parallel_size": 2}, "env": {"NEW_MODEL_DESIGN": "0"}},
            "in the new model design only", id="copies, old design",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"enable_sleep_mode": True}}, "cannot sleep", id="sleep",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"quantization": "gptq"}}, "allowed: compressed-tensors",
            id="quantisation",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"kv_transfer_config": {"kv_connector": "NixlConnector"}}},
            "allowed: TPUOffloadConnector", id="connector",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"kv_transfer_config": {"kv_connector": "TPUConnector"}}},
            "no gateway sends one request to two engines", id="cache handed on",
        ),
        pytest.param(
            "v6e 2x2", None,
            {"args": {"kv_transfer_config": {"kv_connector": "RaidenOffloadConnector"}}},
            "tpu-raiden that it needs is not in the image", id="store outside",
        ),
        pytest.param(
            "v6e 4x4", None,
            {"args": {"kv_transfer_config": {"kv_connector": "TPUOffloadConnector"}}},
            "allowed: a slice of one host", id="host's memory, several hosts",
        ),
        pytest.param(
            "v6e 2x2", None,
            {"args": {"pipeline_parallel_size": 4,
                      "kv_transfer_config": {"kv_connector": "TPUOffloadConnector"}}},
            "it ends where an engine has pipeline stages", id="host's memory, stages",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"speculative_config": {"method": "medusa"}}},
            "speculative_config.method: not on TPU (value medusa)", id="speculation",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"mamba_cache_mode": "all"}}, "align or none", id="mamba",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"attention_backend": "MINE"}}, "none in a Ray actor",
            id="attention backend",
        ),
        pytest.param(
            "tpu7x 2x2x2", None,
            {"args": {"pipeline_parallel_size": 2,
                      "additional_config": {"enable_continue_decode": True}}},
            "does not exist for a pipeline", id="continued decoding",
        ),
        pytest.param(
            "v6e 2x2", None, {"args": {"prefill_context_parallel_size": 3}}, "odd", id="odd",
        ),
        pytest.param(
            "v6e 2x2", None,
            {"args": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}},
            "one of the two", id="both kinds of context parallelism",
        ),
        pytest.param(
            "v6e 2x2", None,
            {"args": {"tensor_parallel_size": 4, "decode_context_parallel_size": 3}},
            "does not divide tensor_parallel_size 4", id="context parallelism not divided",
        ),
        pytest.param(
            "v6e 2x4", QWEN_8B,
            {"args": {"additional_config": ATTENTION_DATA}, "env": {"NEW_MODEL_DESIGN": "0"}},
            "exists in the new model design only", id="old design",
        ),
    ],
)  # fmt: skip
def test_what_tpu_inference_rejects_or_loads_wrongly_is_refused(
    slice_name: str, model: str | None, changes: dict[str, Any], words: str
) -> None:
    odd = {"architectures": ["LlamaForCausalLM"], "hidden_size": 768, "intermediate_size": 768,
           "num_hidden_layers": 1, "num_attention_heads": 24, "num_key_value_heads": 6,
           "vocab_size": 9, "max_position_embeddings": 64}  # fmt: skip
    facts = model_facts(odd) if model == "odd" else None if model is None else facts_of(model)
    assert words in complaint(slice_name, facts, **changes)


@pytest.mark.parametrize(
    ("most", "env", "expected"),
    [
        (256, {}, (16, 32, 64, 128, 256)),
        (200, {}, (16, 32, 64, 128, 208)),
        (2048, {"MIN_TOKEN_BUCKET": "512"}, (512, 1024, 2048)),
        (64, {"VLLM_TPU_BUCKET_PADDING_GAP": "16"}, (16, 32, 48, 64)),
        (8, {}, (16,)),
    ],
)
def test_token_buckets_reach_the_budget_and_not_beyond(
    most: int, env: dict[str, str], expected: tuple[int, ...]
) -> None:
    assert token_buckets(most, env) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(4, (8,)), (8, (8,)), (48, (8, 16, 32, 48)), (64, (8, 16, 32, 64))]
)
def test_request_buckets_reach_the_most_requests(most: int, expected: tuple[int, ...]) -> None:
    assert request_buckets(most) == expected
