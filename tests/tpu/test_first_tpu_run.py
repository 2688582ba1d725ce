"""The script for the first run on real hardware, as far as it goes without any."""

import asyncio
import json
from importlib.metadata import PackageNotFoundError, version

import pytest

from scripts.first_tpu_run import MissingError, devices, host_facts, run_engine, versions
from serving.topology import slice_shape
from serving.tpu.plan import EnginePlan, plan_engine
from serving.tpu.wish import EngineWish

from .models import LLAMA_8B, facts_of


def has_vllm_tpu() -> bool:
    try:
        version("vllm-tpu")
    except PackageNotFoundError:
        return False
    return True


def plan(topology: str) -> EnginePlan:
    return plan_engine(EngineWish("m", slice_shape("v6e", topology)), facts_of(LLAMA_8B))


@pytest.mark.skipif(has_vllm_tpu(), reason="vllm-tpu is installed here")
def test_what_is_missing_is_said() -> None:
    with pytest.raises(MissingError, match="vllm-tpu is not installed"):
        devices(plan("2x2"))


def test_slice_of_several_hosts_is_left_to_serve() -> None:
    with pytest.raises(MissingError, match="slicewise serve FILE"):
        asyncio.run(run_engine(plan("4x4")))


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
