"""`slicewise first-run` of the shipped configuration, from nothing to the archive."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from deployments.first_run.order import RunStage
from deployments.first_run.record.evidence import ARCHIVE
from deployments.first_run.runner import TEXT_PAGE

from .application import PROJECT_ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]

SECRET = "open-sesame-4711"
# The deadlines are meant for a TPU host, and this machine may have other work.
PATIENCE = 5
SKIPPED = {RunStage.HBM, RunStage.THROUGHPUT}


def first_run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-m", "deployments.cli", "first-run", "serve_config.yaml"]
    return subprocess.run(
        [*command, "--out", str(out), "--patience", f"{PATIENCE}", *options],
        cwd=PROJECT_ROOT,
        env=inherited | {"HF_TOKEN": SECRET},
        capture_output=True,
        text=True,
        check=False,
    )


def left_running() -> list[str]:
    """Processes whose environment names a folder of a run's application."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HF_TOKEN") == SECRET:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def outcomes(out: Path) -> dict[str, str]:
    return {
        path.parent.name: json.loads(path.read_text())["outcome"]
        for path in out.glob("*/result.json")
    }


def test_every_stage_but_those_of_chips_passes_on_cpus(tmp_path: Path) -> None:
    done = first_run(tmp_path / "out")
    page = (tmp_path / "out" / TEXT_PAGE).read_text()
    wanted = {stage: "skipped" if stage in SKIPPED else "passed" for stage in RunStage}
    assert (done.returncode, outcomes(tmp_path / "out")) == (0, wanted), page
    assert left_running() == []
    with tarfile.open(tmp_path / "out" / ARCHIVE) as archive:
        names = set(archive.getnames())
        texts = [file.read().decode() for entry in archive if (file := archive.extractfile(entry))]
    for name in ("application-1.log", "application-2.log", "verdict.html", "doctor/hosts.json"):
        assert f"first-run/{name}" in names
    assert not any(SECRET in text for text in texts)
    assert any('"HF_TOKEN": "***"' in text for text in texts)


def test_wrong_reference_is_a_fault_that_the_verdict_names(tmp_path: Path) -> None:
    """Other weights than those that are served, of the same shape."""
    import transformers

    source = PROJECT_ROOT / "models/slicewise-demo"
    shape = transformers.AutoConfig.from_pretrained(source)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "other")
    done = first_run(
        tmp_path / "out", "--only", "correctness", "--reference", str(tmp_path / "other")
    )
    assert done.returncode == 1
    assert outcomes(tmp_path / "out") == {"cold_start": "passed", "correctness": "failed"}
    assert "less likely by 0.001 nat or more" in (tmp_path / "out" / TEXT_PAGE).read_text()
    assert left_running() == []
