"""The verdict for a reader, and the comparison of two runs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.first_run.record.comparison import RunUnreadableError, compare_runs, read_run
from deployments.first_run.record.evidence import EvidenceFolder
from deployments.first_run.record.page import html_page, text_page
from deployments.first_run.results import (
    Measurement,
    StageResult,
    failed,
    judged,
    result_json,
    skipped,
    verdict_on,
)

RUN = {"file": "serve_config.yaml", "stages": ["doctor", "hbm"], "reference": None}
READY = judged("cold_start", [Measurement("engines ready", "2", "2 after 40 s", is_met=True)])
LATE = judged("mixed_load", [Measurement("compiled <late>", "0", "3", is_met=False)])


def pages(*results: StageResult, faults: tuple[str, ...] = ()) -> tuple[str, str]:
    verdict = verdict_on(results, faults)
    return text_page(RUN, verdict, results, faults), html_page(RUN, verdict, results, faults)


def test_pages_say_what_was_expected_measured_and_to_be_sent_back() -> None:
    for page in pages(READY, LATE, skipped("hbm", "no chips")):
        assert "failed" in page
        assert "the engines become ready" in page
        assert "2 after 40 s" in page
        assert "no chips" in page
        assert "first-run.tar.gz" in page
        assert "the plan, and the blocks that the engine has" in page


def test_html_page_loads_nothing_and_escapes_what_was_found() -> None:
    _, page = pages(LATE)
    assert "compiled &lt;late&gt;" in page
    assert "<late>" not in page
    for loading in ("http://", "https://", "src=", "href="):
        assert loading not in page


def test_pages_name_what_could_not_be_written() -> None:
    for page in pages(READY, faults=("not in /x: log.txt (No space left on device)",)):
        assert "No space left on device" in page


def written(folder: Path, *results: StageResult) -> Path:
    import json

    evidence = EvidenceFolder(folder, None, (), 0)
    for result in results:
        evidence.write(f"{result.stage}/result.json", json.dumps(result_json(result)))
    path = evidence.archive()
    assert path is not None
    return path


def test_runs_are_compared_by_outcome_and_measurement(tmp_path: Path) -> None:
    before = written(tmp_path / "a", READY, failed("probe", "gone"))
    faster = judged("cold_start", [Measurement("engines ready", "2", "2 after 20 s", is_met=True)])
    written(tmp_path / "b", faster, LATE)
    # An archive and a folder.
    rows = compare_runs(read_run(before), read_run(tmp_path / "b"))
    assert rows == [
        ("probe", "outcome", "failed", "not run"),
        ("cold_start", "engines ready", "2 after 40 s", "2 after 20 s"),
        ("mixed_load", "outcome", "not run", "failed"),
        ("mixed_load", "compiled <late>", "-", "3"),
    ]


def test_run_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    for place in (tmp_path, tmp_path / "text", tmp_path / "absent"):
        with pytest.raises(RunUnreadableError, match=str(place)):
            read_run(place)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(build_cli([]), ["first-run", *map(str, arguments)])
    return result.exit_code, result.output


def test_command_compares_two_runs(tmp_path: Path) -> None:
    written(tmp_path / "a", READY)
    written(tmp_path / "b", LATE)
    code, output = invoke("--compare", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "cold_start" in output
    assert "not run" in output
    assert invoke("--compare", tmp_path / "a", tmp_path / "a") == (0, "no difference\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a FILE to be served"),
        (["absent.yaml"], "absent.yaml"),
        (["--compare", "absent", "absent"], "absent"),
        (["serve_config.yaml", "--out", "/dev/null/x"], "--out /dev/null/x"),
        (["serve_config.yaml", "--out", "gs://"], "--out gs://"),
    ],
)
def test_command_of_no_use_is_refused_with_the_reason(arguments: list[str], words: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert words in output
