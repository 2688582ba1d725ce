"""`slicewise engine-plan`, and the TPU serve configs: each loaded and planned as it would start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.engine_plan import EnginePlanReport, plan_json, plan_lines, plan_serve_config
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.tpu.plan import EnginePlan

from .models import DEPLOYMENTS, MODELS

RAY = {"TPU_MULTIHOST_BACKEND": "ray", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"}
# Config: the slice, hosts, arguments and environment that its engines start with.
EXPECTED: dict[str, tuple[str, int, dict[str, Any], dict[str, str]]] = {
    "v6e-1x1-llama-3.1-8b": ("v6e 1x1", 1, {"tensor_parallel_size": 1}, {}),
    "v6e-2x4-llama-3.1-8b-per-chip": ("v6e 1x1", 1, {"tensor_parallel_size": 1}, {}),
    "v6e-2x4-llama-3.3-70b": ("v6e 2x4", 1, {"tensor_parallel_size": 8}, {}),
    "v6e-2x2-llama-3.1-8b": ("v6e 2x2", 1, {"tensor_parallel_size": 4}, {}),
    "v6e-4x4-llama-3.3-70b": ("v6e 4x4", 4, {"tensor_parallel_size": 16}, RAY),
    "v5e-2x4-qwen3-8b": ("v5e 2x4", 1, {"tensor_parallel_size": 8}, {}),
    "v5p-2x2x2-llama-3.3-70b": ("v5p 2x2x2", 2, {"tensor_parallel_size": 8}, RAY),
    "tpu7x-2x2x1-qwen3-coder-480b": (
        "tpu7x 2x2x1", 1, {"tensor_parallel_size": 8, "enable_expert_parallel": True}, {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def report_of() -> Callable[[object], EnginePlanReport]:
    # Reading vLLM's arguments takes a second.
    vllm_args = installed_vllm_args()
    return lambda raw: plan_serve_config(raw, vllm_args, [MODELS])


@pytest.fixture(scope="module")
def plans(report_of: Callable[[object], EnginePlanReport]) -> dict[str, EnginePlan]:
    """The plan of the one engine of each serve config."""
    found = {}
    for name in EXPECTED:
        report = report_of(load_yaml((DEPLOYMENTS / f"{name}.yaml").read_text()))
        assert report.problems == ()
        (found[name],) = report.plans
    return found


def changed(**model: Any) -> dict[str, Any]:
    """The serve config of Llama-3.1-8B with other fields of its model."""
    raw: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / "v6e-2x2-llama-3.1-8b.yaml").read_text())
    raw["applications"][0]["args"]["models"][0] |= model
    return raw


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(build_cli([]), ["engine-plan", *map(str, arguments)])
    return result.exit_code, result.output


def test_every_serve_config_is_expected_here() -> None:
    assert {path.stem for path in DEPLOYMENTS.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_serve_config_turns_into_arguments_and_environment(
    name: str, plans: dict[str, EnginePlan]
) -> None:
    slice_name, num_hosts, args, env = EXPECTED[name]
    plan = plans[name]
    shape = plan.requirements.shape
    assert (f"{shape.generation} {shape.topology}", shape.num_hosts) == (slice_name, num_hosts)
    assert plan.settings.engine_args | args == plan.settings.engine_args
    environment = dict(plan.settings.environment)
    assert environment.pop("VLLM_XLA_CACHE_PATH") == "/tmp/slicewise-programs"
    kept = {key: value for key, value in environment.items() if not key.startswith("JAX_")}
    assert kept == env


@pytest.mark.parametrize("name", EXPECTED)
def test_serve_config_fits_with_room_for_many_requests(
    name: str, plans: dict[str, EnginePlan]
) -> None:
    budget = plans[name].budget
    assert budget is not None
    assert budget.fits
    assert budget.cache_tokens > 4 * budget.max_model_len


def test_model_facts_name_their_source_and_the_day_they_were_read() -> None:
    paths = list(MODELS.glob("*.json"))
    assert len(paths) > 3
    for path in paths:
        entry = json.loads(path.read_text())
        assert entry.keys() == {"repository", "source", "read", "config"}
        assert entry["read"].startswith("2026-")


def test_report_says_what_an_engine_starts_with_and_why(plans: dict[str, EnginePlan]) -> None:
    text = "\n".join(plan_lines(plans["v6e-4x4-llama-3.3-70b"]))
    assert "meta-llama/Llama-3.3-70B-Instruct on v6e 4x4: 16 chips, 4 hosts" in text
    assert "TPU_MULTIHOST_BACKEND=ray                   4 hosts: one worker on each" in text
    assert "8.37 GiB  weights" in text
    assert "memory of the fullest device: expected, not measured" in text


def test_report_for_a_program_has_a_reason_for_everything(plans: dict[str, EnginePlan]) -> None:
    plan = plan_json(plans["v5e-2x4-qwen3-8b"])
    assert plan["memory"]["fits"] is True
    assert set(plan["reasons"]) == plan["engine_args"].keys() | plan["environment"].keys()


def test_engine_that_does_not_fit_is_reported_with_what_would(
    report_of: Callable[[object], EnginePlanReport],
) -> None:
    report = report_of(changed(source="meta-llama/Llama-3.3-70B-Instruct"))
    assert not report.can_start
    text = "\n".join(plan_lines(report.plans[0]))
    assert "DOES NOT FIT" in text
    assert "v6e 2x4 (8 chips, 1 host)" in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"engine_args": {"max_model_len": 1_000_000}}, "longer than the model's own context"),
        ({"engine_env": {"TPU_MULTIPROCESS_DP": "1"}}, "TPU_MULTIPROCESS_DP: set by Slicewise"),
        ({"engine": "vllm"}, "compile_cache: engine vllm compiles nothing that is kept"),
        ({"compile_cache": {"store": "ftp://h/x"}}, "compile_cache.store: no store is reached by"),
        ({"compile_cache": {"store": "xla"}}, "compile_cache.store: a relative folder is another"),
        ({"compile_cache": {"store": "/x", "local_dir": "y"}}, "local_dir"),
        ({"deployments": [{"compute_class": "spot"}]}, "required by engine vllm-tpu"),
        ({"engine_args": {"tensor_parallel_size": 3}}, "tensor x pipeline is not the 4 devices"),
        (
            {
                "engine_args": {"pipeline_parallel_size": 2},
                "deployments": [
                    {
                        "compute_class": "on-demand",
                        "slice": {"generation": "v5p", "topology": "2x2x2"},
                    }
                ],
            },
            "engine_args.pipeline_parallel_size: tpu-inference counts 2 devices for a chip of v5p",
        ),
        (
            {"lora_adapters": [{"name": "a", "path": "b"}]},
            "engine_args.enable_lora: models[0].lora_adapters needs it",
        ),
    ],
)
def test_engine_that_is_refused_is_reported_with_the_reason(
    model: dict[str, Any], words: str, report_of: Callable[[object], EnginePlanReport]
) -> None:
    report = report_of(changed(**model))
    assert not report.can_start
    assert words in "\n".join(report.problems)


def test_model_of_which_nothing_is_known_is_planned_without_a_budget(
    report_of: Callable[[object], EnginePlanReport],
) -> None:
    report = report_of(changed(source="nobody/nothing"))
    assert report.can_start
    text = "\n".join(plan_lines(report.plans[0]))
    assert "memory: not counted, the model's config.json is not at hand" in text


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ({}, 0, "fits: 799055 tokens in the cache"),
        ({"source": "meta-llama/Llama-3.3-70B-Instruct"}, 1, "DOES NOT FIT"),
        ({"engine": "paced", "engine_args": {}, "compile_cache": None}, 2, "no model with engine"),
    ],
)
def test_exit_status_tells_what_can_start(
    model: dict[str, Any], status: int, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(changed(**model)))
    found, output = run(file, "--models", MODELS)
    assert (found, words in output) == (status, True)
