"""`slicewise scorecard` and `slicewise compare` as they are typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from made_run import MadeRun, eventful_run, steady_run
from typer.testing import CliRunner

from loadtest.report.command import compare_command, scorecard_command

pytestmark = pytest.mark.slow

COMMANDS = typer.Typer()
COMMANDS.command("scorecard")(scorecard_command)
COMMANDS.command("compare")(compare_command)


def run_command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(
        COMMANDS, [str(argument) for argument in arguments], env={"COLUMNS": "80"}
    )
    return result.exit_code, result.output


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return steady_run().write(tmp_path / "run")


def test_scorecard_writes_both_files_and_prints_the_verdict_first(run_dir: Path) -> None:
    code, said = run_command("scorecard", run_dir)
    assert code == 0
    assert said.startswith("OK: 0 of 120 requests failed, no objectives given")
    assert json.loads((run_dir / "scorecard.json").read_text())["verdict"]["exit_code"] == 0
    assert "<title>OK" in (run_dir / "report.html").read_text()


def test_objectives_of_the_file_set_the_exit_code(run_dir: Path, tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("ttft_s: {p95: 0.05}")
    code, said = run_command("scorecard", run_dir, "--slo", slo)
    assert code == 3
    assert "1 of 1 objective missed: ttft_s.p95" in said
    stored = json.loads((run_dir / "scorecard.json").read_text())
    assert stored["slo"]["ok"] is False


def test_prices_make_a_cost(tmp_path: Path) -> None:
    run_dir = eventful_run().write(tmp_path / "run")
    prices = tmp_path / "prices.yaml"
    prices.write_text("{spot: 0.5, reserved: 1.0}")
    _, unpriced = run_command("scorecard", run_dir)
    _, priced = run_command("scorecard", run_dir, "--prices", prices)
    assert "not priced: no prices were given" in unpriced
    assert "per million output tokens" in priced


def test_table_fits_eighty_columns(tmp_path: Path) -> None:
    run_dir = eventful_run().write(tmp_path / "run")
    _, said = run_command("scorecard", run_dir)
    assert max(map(len, said.splitlines())) <= 80
    assert "schedule lag" in said
    assert "(not done)" in said


@pytest.mark.parametrize(
    ("text", "words"), [("ttft: {}", "no such field"), ("ttft_s: {p95: -1}", "greater than 0")]
)
def test_wrong_file_is_a_usage_error(run_dir: Path, tmp_path: Path, text: str, words: str) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(text)
    code, said = run_command("scorecard", run_dir, "--slo", slo)
    assert code == 2
    assert words in said
    assert not (run_dir / "scorecard.json").exists()


def test_folder_without_a_run_is_a_usage_error(tmp_path: Path) -> None:
    code, said = run_command("scorecard", tmp_path)
    assert code == 2
    assert "holds no run" in said


def test_compare_prints_every_metric_and_writes_where_asked(tmp_path: Path) -> None:
    a = eventful_run(1).write(tmp_path / "a")
    b = eventful_run(2, slower=1.5).write(tmp_path / "b")
    out = tmp_path / "out"
    code, said = run_command("compare", a, b, "--out", out)
    assert code == 0
    rows = {line[:13].strip(): line for line in said.splitlines()}
    assert "worse" in rows["TTFT p50"]
    assert "throughput" in rows
    stored = json.loads((out / "comparison.json").read_text())
    assert stored["differences"][0]["outcome"] == "worse"
    assert "Load tests compared" in (out / "comparison.html").read_text()


def test_compare_with_an_invalid_run_exits_with_four(tmp_path: Path) -> None:
    a = steady_run().write(tmp_path / "a")
    b = MadeRun(steady_run().requests, client=()).write(tmp_path / "b")
    code, said = run_command("compare", a, b)
    assert code == 4
    assert "INVALID" in said
    assert "not judged" in said


def test_command_module_is_light() -> None:
    script = """import sys, loadtest.report.command
print([name for name in ('matplotlib', 'numpy', 'jinja2', 'rich.table') if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout
    assert "matplotlib" not in loaded
    assert "numpy" not in loaded
    assert "jinja2" not in loaded
