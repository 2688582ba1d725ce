"""A run goes on after what goes wrong in a stage, and everything before it is kept."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from deployments.first_run.order import RunStage
from deployments.first_run.process import run_stage_process
from deployments.first_run.record.evidence import ARCHIVE, EvidenceFolder
from deployments.first_run.results import RunVerdict, StageOutcome
from deployments.first_run.runner import FirstRun, RunOrder
from serving.artifacts.object_store.address import open_store

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
STAGED = (sys.executable, "-m", "tests.deployments.first_run.staged")
# None of these asks an application.
STAGES = (RunStage.DOCTOR, RunStage.PROBE, RunStage.HOSTS)
DOCTOR, PROBE, HOSTS = STAGES


def run_of(
    tmp_path: Path,
    behaviour: dict[str, str],
    stages: tuple[RunStage, ...] = STAGES,
    store: Path | None = None,
    patience: float = 1.0,
) -> tuple[FirstRun, RunVerdict, list[str]]:
    said: list[str] = []
    opened = None if store is None else open_store(str(store))
    evidence = EvidenceFolder(tmp_path / "out", opened, ["opensesame"], 4096)
    order = RunOrder(
        tmp_path / "file.yaml",
        behaviour,
        stages,
        tmp_path,
        patience=patience,
        program=STAGED,
    )
    run = FirstRun(order, evidence, said.append)
    return run, run.run(), said


def outcomes(run: FirstRun) -> list[StageOutcome]:
    return [result.outcome for result in run.results.values()]


def archived(tmp_path: Path) -> set[str]:
    with tarfile.open(tmp_path / "out" / ARCHIVE) as archive:
        return {name.removeprefix("first-run/") for name in archive.getnames()}


def test_stages_run_in_order_and_each_is_told_of_those_before(tmp_path: Path) -> None:
    _, verdict, said = run_of(tmp_path, {})
    assert verdict.has_passed
    assert (tmp_path / "out/hosts/seen.txt").read_text() == "['doctor', 'probe']"
    assert [text for text in said if text.endswith("...")] == [f"{stage} ..." for stage in STAGES]
    wanted = {"run.json", "verdict.txt", "verdict.html"}
    wanted |= {
        f"{each}/{name}" for each in STAGES for name in ("result.json", "log.txt", "seen.txt")
    }
    assert archived(tmp_path) == wanted


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("fail", "it is broken"),
        ("kill", "its process was ended by SIGKILL"),
        ("exit", "its process ended with status 3 and without a result"),
    ],
)
def test_run_goes_on_after_a_stage_that_fails_and_names_it(
    tmp_path: Path, behaviour: str, words: str
) -> None:
    run, verdict, _ = run_of(tmp_path, {PROBE: behaviour})
    assert outcomes(run) == [StageOutcome.PASSED, StageOutcome.FAILED, StageOutcome.PASSED]
    assert not verdict.has_passed
    assert f"first fault: probe: {words}" in verdict.reason
    assert "probe begins" in (tmp_path / "out/probe/log.txt").read_text()
    assert {"doctor/result.json", "probe/result.json", "hosts/result.json"} <= archived(tmp_path)
    assert words in (tmp_path / "out/verdict.txt").read_text()
    assert words in (tmp_path / "out/verdict.html").read_text()


def test_stage_that_hangs_is_ended_at_its_deadline_and_what_it_said_is_kept(
    tmp_path: Path,
) -> None:
    # A twentieth of the deadline of `probe`: 6 s.
    stages = (PROBE, RunStage.COLD_START)
    run, verdict, _ = run_of(tmp_path, {PROBE: "hang"}, stages, patience=0.05)
    assert outcomes(run) == [StageOutcome.FAILED, StageOutcome.PASSED]
    assert "probe: it had no result within 6 s and was ended" in verdict.reason
    assert (tmp_path / "out/probe/log.txt").read_text() == "probe begins\nand hangs\n"


def test_stage_is_over_though_what_it_started_goes_on(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    request = {"stage": "probe", "settings": {"probe": "leave a child"}, "earlier": {}}
    end = run_stage_process(request, 300, told.append, lambda _: None, STAGED)
    assert end.status == 0
    assert told[-1]["result"]["outcome"] == "passed"


def test_stage_that_asks_an_application_is_blocked_without_one(tmp_path: Path) -> None:
    run, verdict, _ = run_of(tmp_path, {}, (DOCTOR, RunStage.CORRECTNESS, HOSTS))
    assert outcomes(run) == [StageOutcome.PASSED, StageOutcome.BLOCKED, StageOutcome.PASSED]
    assert "correctness: the application does not answer" in verdict.reason
    stored = json.loads((tmp_path / "out/correctness/result.json").read_text())
    assert stored["outcome"] == "blocked"


def test_store_that_is_away_does_not_end_the_run_and_fails_it(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("no folder")
    run, verdict, _ = run_of(tmp_path, {}, store=tmp_path / "bucket")
    assert set(outcomes(run)) == {StageOutcome.PASSED}
    assert not verdict.has_passed
    assert "not in the store" in verdict.reason
    assert "hosts/result.json" in archived(tmp_path)


def test_run_that_is_told_to_end_writes_what_it_has(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from deployments.first_run import command\n"
        "from tests.deployments.first_run import test_first_run_runner as here\n"
        "for number in command._ENDING: command.signal.signal(number, command._interrupt)\n"
        "run, verdict, said = here.run_of(Path(sys.argv[1]), {'probe': 'end the run'})\n"
        "print(verdict.reason)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "probe: the run was ended by SIGTERM" in done.stdout
    assert {"doctor/result.json", "probe/result.json", "probe/log.txt", "verdict.html"} <= archived(
        tmp_path
    )
    assert "not run: hosts" in (tmp_path / "out/verdict.txt").read_text()
