"""How each kind of source is loaded, and what is refused."""

from typing import Any

import pytest

from serving.artifacts.weights.sources import SourceKind, load_plan, source_problems


@pytest.mark.parametrize(
    ("source", "kind", "args"),
    [
        ("/mnt/models/llama", SourceKind.FOLDER, {}),
        ("gs://bucket/llama", SourceKind.BUCKET, {"load_format": "runai_streamer"}),
        ("s3://bucket/llama", SourceKind.BUCKET, {"load_format": "runai_streamer"}),
        ("meta-llama/Llama-3.1-8B", SourceKind.HUGGING_FACE, {}),
    ],
)
def test_source_is_loaded_by_its_kind(source: str, kind: SourceKind, args: dict[str, Any]) -> None:
    plan = load_plan(source, {})
    assert (plan.kind, plan.engine_args) == (kind, args)
    assert plan.needs
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
    assert load_plan("gs://b/m", args).engine_args == {"load_format": "runai_streamer_sharded"}
