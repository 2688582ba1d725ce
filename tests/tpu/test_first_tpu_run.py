"""The script for the first run on real hardware, as far as it goes without any."""

import asyncio
import json
from importlib.metadata import PackageNotFoundError, version

import pytest

from scripts.first_tpu_run import (
    MissingError,
    devices,
    host_facts,
    load_times,
    run_engine,
    versions,
)
from serving.domain.topology import slice_shape
from serving.tpu.plan import EnginePlan, plan_engine
from serving.tpu.requirements import EngineRequirements

from .models import LLAMA_8B, facts_of


def has_vllm_tpu() -> bool:
    try:
        version("vllm-tpu")
    except PackageNotFoundError:
        return False
    return True


def plan(topology: str, num_slices: int = 1) -> EnginePlan:
    requirements = EngineRequirements("m", slice_shape("v6e", topology), num_slices=num_slices)
    return plan_engine(requirements, facts_of(LLAMA_8B))


@pytest.mark.skipif(has_vllm_tpu(), reason="vllm-tpu is installed here")
def test_what_is_missing_is_said() -> None:
    with pytest.raises(MissingError, match="vllm-tpu is not installed"):
        devices(plan("2x2"))


@pytest.mark.parametrize(("topology", "num_slices"), [("4x4", 1), ("2x2", 2)])
def test_engine_over_several_hosts_is_left_to_serve(topology: str, num_slices: int) -> None:
    with pytest.raises(MissingError, match="slicewise serve FILE"):
        asyncio.run(run_engine(plan(topology, num_slices)))


def test_weights_and_compilation_are_timed_apart() -> None:
    times = load_times(100.0, 160.0, 400.0)
    assert times == {"ready_s": 300.0, "weights_s": 60.0, "compile_s": 240.0}


def test_without_a_word_of_the_worker_they_are_not_known_apart() -> None:
    times = load_times(100.0, None, 400.0)
    assert times == {"ready_s": 300.0, "weights_s": None, "compile_s": None}


def test_report_tells_which_variables_are_set_and_not_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    facts = host_facts()
    assert "VLLM_API_KEY" in facts["variables"]
    assert "hush" not in json.dumps(facts)


def test_versions_name_what_is_installed_and_what_is_not() -> None:
    found = versions()
    assert found["ray"] == version("ray")
    assert found.keys() >= {"python", "vllm-tpu", "jax", "libtpu"}
