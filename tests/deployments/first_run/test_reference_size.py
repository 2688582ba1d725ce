"""A reference that does not fit is not tried; by its size as far as it is known here."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.engine_plan import SHIPPED_FACTS
from deployments.first_run.context import StageContext
from deployments.first_run.hosts.memory import read_host_memory
from deployments.first_run.order import RunStage
from deployments.first_run.results import StageOutcome
from deployments.first_run.stages.correctness import correctness
from deployments.first_run.stages.reference_size import loaded_bytes, no_room, reference_bytes
from serving.domain.topology import GIB
from serving.tpu.model_facts import model_facts

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models/slicewise-demo"
# 8,030,261,248 parameters, as its page has it.
LLAMA_8B, LLAMA_8B_BYTES = "meta-llama/Llama-3.1-8B-Instruct", 2 * 8_030_261_248


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHIPPED_FACTS / name).read_text())["config"]
    return found


def test_hugging_face_id_counts_by_the_facts_of_its_model() -> None:
    assert reference_bytes(LLAMA_8B, "auto", [SHIPPED_FACTS]) == LLAMA_8B_BYTES
    assert reference_bytes(LLAMA_8B, "bfloat16", [SHIPPED_FACTS]) == LLAMA_8B_BYTES
    assert reference_bytes(LLAMA_8B, "float32", [SHIPPED_FACTS]) == 2 * LLAMA_8B_BYTES


def test_model_that_nobody_knows_has_no_size() -> None:
    assert reference_bytes("nobody/knows", "auto", [SHIPPED_FACTS]) is None


def test_folder_counts_by_its_weights(tmp_path: Path) -> None:
    stored = (DEMO / "model.safetensors").stat().st_size
    own = reference_bytes(str(DEMO), "auto", [])
    assert own is not None
    assert own >= stored
    # Of an architecture that is not counted here.
    shutil.copytree(DEMO, tmp_path / "other")
    config = json.loads((DEMO / "config.json").read_text()) | {"architectures": ["Other"]}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    assert reference_bytes(str(tmp_path / "other"), "auto", []) == stored
    # With half of it still to come, what is known of the whole counts.
    (tmp_path / "other/model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 3 * stored}})
    )
    assert reference_bytes(str(tmp_path / "other"), "auto", []) == 3 * stored


def test_folder_that_cannot_be_read_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("no JSON")
    assert reference_bytes(str(tmp_path), "auto", []) is None


def test_quantised_weights_count_as_they_are_unpacked() -> None:
    facts = model_facts(config_of("qwen3-coder-480b-a35b-fp8.json"))
    assert facts.weights.method == "fp8"
    assert loaded_bytes(480 * GIB, facts, "auto") == pytest.approx(2 * 480 * GIB, rel=0.001)


def test_reference_is_run_where_it_has_room_and_is_told_why_where_not() -> None:
    assert no_room("m", 10 * GIB, 13 * GIB) is None
    told = no_room("m", 10 * GIB, 13 * GIB - 1)
    assert told is not None
    assert "m needs 13.00 GiB of memory with transformers, and 13.00 GiB are free" in told
    unknown = no_room("m", None, 1000 * GIB)
    assert unknown is not None
    assert "the size of m is not known here" in unknown


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nobody/knows", "the size of nobody/knows is not known here"),
        # More than any machine on which this runs has.
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", " GiB of memory with transformers"),
    ],
)
def test_stage_without_room_is_skipped_before_anybody_is_asked(
    tmp_path: Path, reference: str, reason: str
) -> None:
    told: list[Mapping[str, Any]] = []
    context = StageContext(
        stage=RunStage.CORRECTNESS,
        file=tmp_path / "serve_config.yaml",
        settings=yaml.safe_load((ROOT / "serve_config.yaml").read_text()),
        scratch=tmp_path,
        until_s=time.monotonic() + 60.0,
        address=None,
        reference=reference,
        application=None,
        earlier={},
        tell=told.append,
    )
    found = correctness(context)
    assert found.outcome == StageOutcome.SKIPPED
    assert reason in found.reason
    assert told == []


def test_model_of_eight_billion_parameters_is_not_loaded_into_a_head_of_sixteen_gib(
    tmp_path: Path,
) -> None:
    """Whose machine has more: what counts is the limit of the container."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{16 * GIB}\n")
    (group / "memory.current").write_text("0\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    free = read_host_memory(tmp_path).free_bytes
    assert free <= 16 * GIB
    assert no_room(LLAMA_8B, reference_bytes(LLAMA_8B, "auto", [SHIPPED_FACTS]), free)
