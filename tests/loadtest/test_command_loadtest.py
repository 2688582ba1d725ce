import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from golden_server import Golden, golden_server
from typer.testing import CliRunner

from loadtest.command import loadtest_command
from loadtest.recorder import merge_parts
from loadtest.records import RequestRecord, RunEnd, RunStart, read_records
from loadtest.run.launch import default_sim_socket

pytestmark = pytest.mark.process

COMMAND = "import typer; from loadtest.command import loadtest_command; typer.run(loadtest_command)"
ROOT = Path(__file__).parents[2]


def refused(golden: Golden, out: Path, *arguments: str) -> str:
    """What the command says as it refuses."""
    cli = typer.Typer()
    cli.command()(loadtest_command)
    given = ["--url", golden.url, "--out", str(out), *arguments]
    result = CliRunner().invoke(cli, given)
    assert result.exit_code == 2
    assert not out.exists()
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def golden():
    with golden_server(models="golden;other") as server:
        yield server


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--duration", "5"], "none given; allowed: one of --rate, --users, --trace, --workload"),
        (["--duration", "5", "--rate", "1", "--users", "2"], "rate, users given; allowed: one of"),
        (["--duration", "0", "--rate", "1"], "duration_s=0.0: Input should be greater than 0"),
        (["--duration", "5", "--rate", "0"], "rate_per_s"),
        (["--duration", "5", "--rate", "1", "--warmup", "5"], "warmup_s=5 is not allowed: below"),
        (["--duration", "5", "--rate", "1", "--workers", "0"], "num_workers=0: Input should be"),
        (["--duration", "5", "--rate", "1", "--retries", "-1"], "limits.max_retries=-1: Input"),
        (["--duration", "5", "--rate", "1", "--check", "recorded"], "recorded with a file"),
        (
            ["--duration", "5", "--rate", "1", "--model", "x"],
            "model=x is not served; allowed: golden",
        ),
        (["--duration", "5", "--rate", "1", "--api-key-env", "NO_SUCH"], "NO_SUCH is not set"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    golden: Golden, tmp_path: Path, arguments: list[str], words: str
) -> None:
    assert words in refused(golden, tmp_path / "out", *arguments)


def test_server_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    with golden_server() as gone:
        pass
    words = refused(gone, tmp_path / "out", "--rate", "1", "--duration", "1")
    assert "/v1/models cannot be read" in words


def test_simulation_is_found_where_its_command_puts_it() -> None:
    from deployments.simulation.control import default_socket

    assert default_sim_socket() == default_socket()


def test_command_is_light_to_import() -> None:
    """Every `slicewise` command imports it."""
    heavy = {"numpy", "gevent", "locust", "matplotlib", "aiohttp", "ray"}
    script = f"import sys, loadtest.command; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def start(golden: Golden, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, "--url", golden.url, "--out", str(out), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def await_answers(golden: Golden, process: subprocess.Popen[str]) -> None:
    """Until a few answers were written; the run goes on meanwhile."""
    while sum(bool(each["written_ns"]) for each in golden.truth()["requests"].values()) < 5:
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.1)


@pytest.mark.long
def test_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with golden_server(models="ttft=5,dt=5") as golden:
        given = ["--rate", "50", "--duration", "60", "--workers", "2", "--output-tokens", "4"]
        with start(golden, out, *given) as process:
            await_answers(golden, process)
            os.kill(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the run was cut short: interrupted" in said
    first, *records, last = read_records(out / "requests.jsonl")
    requests = [record for record in records if isinstance(record, RequestRecord)]
    assert isinstance(first, RunStart)
    assert isinstance(last, RunEnd)
    assert last.reason == "interrupted"
    assert requests
    # What was scheduled for later is not missing.
    assert first.num_scheduled is not None
    assert abs(first.num_scheduled - len(requests)) < 50
    card = json.loads((out / "scorecard.json").read_text())
    assert card["run"]["cut_short"] == "interrupted"
    assert sorted(path.name for path in out.iterdir()) == [
        "plan.json",
        "prompts.json",
        "report.html",
        "requests.jsonl",
        "scorecard.json",
    ]


def is_somebody_at_work_on(out: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out) in process.read_text():
                return True
        except OSError:
            continue  # it ended meanwhile
    return False


@pytest.mark.long
def test_killed_run_can_still_be_merged(tmp_path: Path) -> None:
    """Workers end by themselves when their parent is gone, and nothing that had ended is lost."""
    out = tmp_path / "out"
    with golden_server(models="ttft=5,dt=5") as golden:
        given = ["--rate", "50", "--duration", "60", "--output-tokens", "4"]
        with start(golden, out, *given) as process:
            await_answers(golden, process)
            process.kill()
            process.wait()
        while is_somebody_at_work_on(out):
            time.sleep(0.1)
        num_asked = len(golden.truth()["requests"])
    requests = [
        read_record
        for read_record in read_records(merge_parts(out))
        if isinstance(read_record, RequestRecord)
    ]
    # Those that were in flight as their worker learnt of the end are recorded as unfinished.
    assert len(requests) == num_asked
