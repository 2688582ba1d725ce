"""How each kind of source is loaded, and what is refused."""

from typing import Any

import pytest

from serving.artifacts.weights.sources import source_problems
from serving.domain.topology import slice_shape
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import engine_settings


def settings(source: str, args: dict[str, Any]) -> dict[str, object]:
    shape = slice_shape("v6e", "2x4", 8)
    return engine_settings(EngineRequirements(source, shape, args), None).engine_args


@pytest.mark.parametrize(
    ("source", "load_format"),
    [
        ("/mnt/models/llama", None),
        ("gs://bucket/llama", "runai_streamer"),
        ("s3://bucket/llama", "runai_streamer"),
        ("meta-llama/Llama-3.1-8B", None),
    ],
)
def test_source_is_loaded_by_its_kind(source: str, load_format: str | None) -> None:
    assert settings(source, {}).get("load_format") == load_format
    assert list(source_problems("models[0]", source, {})) == []


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("gs://b/m", {"load_format": "safetensors"}, "load_format: does not read from a bucket"),
        (
            "gs://b/m",
            {"model_loader_extra_config": {"threads": 4}},
            "model_loader_extra_config.threads: unknown to the streamer; allowed: distributed",
        ),
        ("https://host/m", {}, "source: no such kind of address"),
    ],
)
def test_what_vllm_would_refuse_later_is_refused_with_what_works(
    source: str, args: dict[str, Any], words: str
) -> None:
    problems = [str(problem) for problem in source_problems("models[0]", source, args)]
    assert len(problems) == 1
    assert words in problems[0]


def test_streamer_that_is_set_by_hand_stays() -> None:
    args = {
        "load_format": "runai_streamer_sharded",
        "model_loader_extra_config": {"concurrency": 16},
    }
    assert list(source_problems("m", "gs://b/m", args)) == []
    assert settings("gs://b/m", args)["load_format"] == "runai_streamer_sharded"
