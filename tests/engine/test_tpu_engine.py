"""What an engine on TPU is started with, as it is decided on the first host of its slice."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from serving.config.slice_spec import SliceSpec
from serving.domain.topology import slice_shape
from serving.engine.spec import CompileCacheSpec, EngineSpec, TpuSpec
from serving.engine.tpu.settings import resolve_settings, resolve_settings_here

MODELS = Path(__file__).parents[2] / "deployments" / "tpu" / "models"


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())["config"]
    return config


def spec(topology: str, source: str = "org/m", **changes: Any) -> EngineSpec:
    wanted = SliceSpec("spot", slice_shape("v6e", topology))
    tpu = TpuSpec(CompileCacheSpec("/programs", "/xla", 60.0))
    return EngineSpec("m", source, "spot", slice=wanted, tpu=tpu, **changes)


def test_engine_over_hosts_gets_sizes_and_environment() -> None:
    resolved = resolve_settings(
        spec("4x4", engine_args={"max_model_len": 8192}, engine_env={"HF_HOME": "/models"}),
        config_of("qwen3-8b"),
    )
    assert resolved.engine_args["max_model_len"] == 8192
    assert resolved.engine_args["tensor_parallel_size"] == 16
    assert resolved.engine_env["HF_HOME"] == "/models"
    assert resolved.engine_env["TPU_MULTIHOST_BACKEND"] == "ray"
    assert resolved.engine_env["MODEL_IMPL_TYPE"] == "vllm"
    assert resolved.engine_env["VLLM_XLA_CACHE_PATH"] == "/xla"


def test_engine_that_does_not_fit_is_not_started() -> None:
    with pytest.raises(ValueError, match=r"What would fit: additional_config .*qwix.*; v6e 2x4"):
        resolve_settings(spec("2x2"), config_of("llama-3.3-70b"))


def test_engine_that_would_be_loaded_wrongly_is_not_started() -> None:
    env = {"MODEL_IMPL_TYPE": "flax_nnx"}
    with pytest.raises(ValueError, match="cannot load 8 KV heads over 16 shards"):
        resolve_settings(spec("4x4", engine_env=env), config_of("qwen3-8b"))


def test_model_in_a_folder_is_read_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama-3.1-8b")))
    resolved = resolve_settings_here(spec("2x2", str(tmp_path)))
    assert resolved.engine_args["max_model_len"] == 131072


def test_file_that_cannot_be_read_leaves_the_model_undecided(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{")
    with caplog.at_level(logging.WARNING, "serving.engine.tpu.settings"):
        resolved = resolve_settings_here(spec("2x2", str(tmp_path)))
    assert "max_model_len" not in resolved.engine_args
    assert "model_config_unreadable" in caplog.text


def test_every_setting_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "serving.engine.tpu.settings"):
        resolve_settings(spec("2x2"), config_of("llama-3.1-8b"))
    assert "name=tensor_parallel_size value=4 reason='all 4 devices" in caplog.text
    assert "engine_memory model=m hbm_bytes=" in caplog.text
