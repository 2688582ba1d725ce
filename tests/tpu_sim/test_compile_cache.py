"""Programs of a real engine of tpu-inference: a second host finds what a first one compiled.

Each start has an empty folder of its own, as a host has that was never used. JAX writes a file for
each program that it compiles, so files tell of those while serving as well.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tpu_inference import envs

from serving.artifacts.compile_cache.key import changes_programs
from serving.artifacts.model_config_file import find_model_config
from serving.artifacts.weights.revision import config_digest, model_revision
from serving.config.slice_spec import SliceSpec
from serving.domain.topology import slice_shape
from serving.engine.spec import CompileCacheSpec, EngineSpec, TpuSpec
from serving.engine.tpu.compile_cache import (
    HostFacts,
    pull_here,
    push_here,
    versions_here,
    with_programs,
)
from serving.engine.tpu.settings import resolve_settings

from .engines import ANSWER_S, ENGINE_ARGS, START_S, simulation_environment
from .evidence import Evidence
from .tiny_models import QWEN3, TinyModels

pytestmark = [pytest.mark.tpu_sim]

LOG = {"life": "test"}


async def served(models: TinyModels, folder: Path, name: str) -> dict[str, Any]:
    """Pulls, starts an engine that answers all prompts, pushes; what `serve_once` says."""
    spec = resolved(models, folder, name)
    assert spec.programs is not None
    pull_here(spec.programs, LOG)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.tpu_sim.serve_once",
        models.path(QWEN3),
        env=os.environ | simulation_environment(folder, 4) | dict(spec.engine_env),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S + ANSWER_S):
        output, _ = await process.communicate(json.dumps(models.prompts[QWEN3]).encode())
    assert process.returncode == 0
    push_here(spec.programs, (), LOG)
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


def resolved(models: TinyModels, folder: Path, name: str) -> EngineSpec:
    """The engine as the first host of its slice settles it, with an empty folder for programs."""
    cache = CompileCacheSpec(str(folder / "store"), str(folder / name), 60.0)
    source = models.path(QWEN3)
    config = find_model_config(source)
    spec = EngineSpec(
        QWEN3,
        source,
        "spot",
        slice=SliceSpec("spot", slice_shape("v6e", "2x2")),
        tpu=TpuSpec(cache),
        engine_args=ENGINE_ARGS,
    )
    facts = HostFacts(model_revision(source, {}), config_digest(config), versions_here(), {})
    return with_programs(resolve_settings(spec, config), facts)


def files(folder: Path, name: str) -> set[str]:
    return {path.name for path in (folder / name).rglob("*-cache")}


async def test_second_start_compiles_nothing(
    models: TinyModels, tmp_path: Path, evidence: Evidence
) -> None:
    first = await served(models, tmp_path, "first")
    compiled = files(tmp_path, "first")
    assert first["answers"] == models.expected[QWEN3]
    # Some it needs more than once, and finds what it has written a moment ago.
    assert 0 < first["misses"] <= len(compiled)

    second = await served(models, tmp_path, "second")
    assert second["answers"] == models.expected[QWEN3]
    assert second["hits"] == first["hits"] + first["misses"]
    assert second["misses"] == 0
    # JAX writes what it compiles while serving too: nothing.
    assert files(tmp_path, "second") == compiled
    evidence.placed(
        f"compile cache: the first start compiled {first['misses']} programs until it was warm and "
        f"{len(compiled)} in all, the second found {second['hits']} and compiled {second['misses']}"
    )


# Where engines run, how they are watched, when things are copied: nothing that is compiled.
OUTSIDE = {
    "AGGREGATED_STATS_DIR", "DP_SCHED_BATCH_PREFILL", "DP_SCHED_BATCH_PREFILL_FLUSH_TIMEOUT_MS",
    "DP_SCHED_ROUTING", "JAX_PROFILER_SERVER_PORT", "NUM_PRECOMPILE_WORKERS", "NUM_SLICES",
    "PHASED_PROFILING_DIR", "PYTHON_TRACER_LEVEL", "RAIDEN_H2D_SETTLE", "RAY_USAGE_STATS_ENABLED",
    "SKIP_JAX_PRECOMPILE", "TPU_ACCELERATOR_TYPE", "TPU_MULTIHOST_BACKEND", "TPU_MULTIPROCESS_DP",
    "TPU_NAME", "TPU_OFFLOAD_BATCHED_SAVE", "TPU_OFFLOAD_DECODE_SAVE",
    "TPU_OFFLOAD_METRICS_LOG_INTERVAL", "TPU_OFFLOAD_NUM_CPU_CHUNKS", "TPU_OFFLOAD_SAVE_THREADS",
    "TPU_OFFLOAD_SKIP_JAX_PRECOMPILE", "TPU_OFFLOAD_USE_UNPINNED_HOST", "TPU_WORKER_ID",
    "USE_JAX_PROFILER_SERVER", "VERIFY_WEIGHTS", "VLLM_INCREMENTAL_FP8_LOADING",
    "VLLM_TPU_PATCH_MM_EMBEDDINGS", "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    "VLLM_XLA_CHECK_RECOMPILATION",
}  # fmt: skip


def test_every_variable_of_tpu_inference_is_in_the_key_or_known_to_be_outside() -> None:
    known = set(envs.environment_variables)
    assert {name for name in known if not changes_programs(name)} == OUTSIDE
