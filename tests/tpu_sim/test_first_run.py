"""The engine step of the script for the first run on real hardware, on tpu-inference itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .engines import ANSWER_S, START_S, simulation_environment
from .evidence import Evidence
from .tiny_models import LLAMA, PROJECT_ROOT, TinyModels

pytestmark = [pytest.mark.tpu_sim]


def test_engine_is_timed_and_its_late_programs_are_counted(
    models: TinyModels, tmp_path: Path, evidence: Evidence
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tpu_sim.first_run_once", models.path(LLAMA)],
        cwd=PROJECT_ROOT,
        env=os.environ | simulation_environment(tmp_path, 4),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=START_S + ANSWER_S,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ready_s"] == pytest.approx(found["weights_s"] + found["compile_s"])
    assert min(found["weights_s"], found["compile_s"]) > 0
    assert found["num_blocks"] * found["block_size"] >= 1024
    for request in ("first_request", "second_request"):
        assert found[request]["ttft_s"] > found[request]["tpot_s"] > 0
    # Nothing was warmed up here, so the first request compiles.
    (compiled,) = found["compiled_after_warm_up"]
    assert compiled > 0
    evidence.placed(
        "the engine step of `scripts/first_tpu_run.py` ran through, with weights and compilation "
        "timed apart"
    )
