"""The table of features: three states, found in what an engine is configured with."""

from pathlib import Path
from typing import Any

import pytest

from serving.domain.errors import ConfigError
from serving.domain.topology import slice_shape
from serving.tpu.features import (
    FEATURES,
    Feature,
    FeatureState,
    features_markdown,
    features_used,
    untried_notes,
)
from serving.tpu.model_facts import ModelFacts, model_facts
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import engine_settings

from .models import CODER_30B, CODER_480B_FP8, LLAMA_8B, facts_of

ROOT = Path(__file__).resolve().parents[2]
BY_STATE = {state: [each for each in FEATURES if each.state is state] for state in FeatureState}


def used(facts: ModelFacts | None = None, shape: str = "2x2", **args: Any) -> list[str]:
    requirements = EngineRequirements("org/m", slice_shape("v6e", shape), args)
    return [each.name for each in features_used(requirements, facts)]


def test_each_feature_has_one_row() -> None:
    names = [each.name for each in FEATURES]
    assert len(set(names)) == len(names)
    assert all(BY_STATE.values())


@pytest.mark.parametrize("feature", BY_STATE[FeatureState.RUN], ids=lambda each: each.name)
def test_what_was_run_names_the_test_that_did(feature: Feature) -> None:
    assert (ROOT / feature.shown_by).is_file()


def test_plain_engine_uses_what_was_run() -> None:
    requirements = EngineRequirements("org/m", slice_shape("v6e", "2x2"))
    found = features_used(requirements, facts_of(LLAMA_8B))
    assert {each.state for each in found} == {FeatureState.RUN}
    assert list(untried_notes(requirements, facts_of(LLAMA_8B))) == []


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculation by n-grams"),
        ({"speculative_config": {"method": "eagle3"}}, "speculation by an EAGLE-3 draft"),
        (
            {"speculative_config": {"method": "deepseek_mtp"}},
            "speculation by further heads (MTP)",
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache in fp8"),
        ({"quantization": "auto_awq"}, "weights quantised by AWQ"),
        ({"runner": "pooling"}, "embeddings and other pooling"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"additional_config": {"enable_continue_decode": True}}, "continued decoding"),
        (
            {"kv_transfer_config": {"kv_connector": "TPUOffloadConnector"}},
            "KV cache in the host's memory, on one host",
        ),
        ({"data_parallel_size": 2}, "data parallelism on one slice"),
        ({"pipeline_parallel_size": 2}, "pipeline stages, also over hosts"),
    ],
)
def test_feature_is_found_in_the_arguments(args: dict[str, Any], name: str) -> None:
    assert name in used(**args)
    assert name not in used()


def test_feature_is_found_in_the_model() -> None:
    assert "experts, also spread by expert parallelism" in used(facts_of(CODER_30B))
    assert "weights stored in fp8" in used(facts_of(CODER_480B_FP8))
    assert "weights stored in fp8" not in used(facts_of(CODER_30B))
    latent = model_facts(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "kv_lora_rank": 16,
            "vision_config": {},
        }
    )
    assert {"latent attention (MLA)", "images, sound and video in prompts"} <= set(used(latent))


def test_plan_warns_of_what_was_not_run_and_names_upstreams_test() -> None:
    args = {"speculative_config": {"method": "dflash"}}
    requirements = EngineRequirements("org/m", slice_shape("v6e", "2x2"), args)
    settings = engine_settings(requirements, facts_of(LLAMA_8B))
    (note,) = [each for each in settings.notes if "never run" in each]
    assert note == (
        "speculation by DFlash: never run by Slicewise, not even on CPU; upstream's own test is "
        "tests/spec_decode/test_dflash.py"
    )


@pytest.mark.parametrize("connector", ["TPUConnector", "TPUConnectorHMA", "RaidenOffloadConnector"])
def test_what_the_table_calls_refused_is_refused(connector: str) -> None:
    args = {"kv_transfer_config": {"kv_connector": connector}}
    requirements = EngineRequirements("org/m", slice_shape("v6e", "2x2"), args)
    states = {each.state for each in features_used(requirements, None)}
    assert FeatureState.REFUSED in states
    with pytest.raises(ConfigError, match=f"value {connector}"):
        engine_settings(requirements, None)


def test_documentation_shows_the_table() -> None:
    assert features_markdown() in (ROOT / "docs/guide/tpu.md").read_text()
