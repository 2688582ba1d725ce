"""Writes every output of a load test from its records: JSON, page and table.

Owns the names of the files. What is in them is decided by `measure` and `compare`.
"""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from loadtest.errors import ExitCode
from loadtest.report.comparison_table import print_comparison
from loadtest.report.html import comparison_page, report_page
from loadtest.report.table import print_scorecard
from loadtest.scorecard.compare import NamedRun, compare
from loadtest.scorecard.measure import Scorecard, measure
from loadtest.scorecard.slo import NO_OBJECTIVES, ServiceLevel
from loadtest.scorecard.stored_run import read_run

SCORECARD_FILE = "scorecard.json"
REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.json"
COMPARISON_PAGE_FILE = "comparison.html"


def make_scorecard(
    out_dir: Path,
    slo: ServiceLevel | None = None,
    usd_per_chip_hour: Mapping[str, float] | None = None,
) -> Scorecard:
    """The scorecard of the run in `out_dir`. `slo` is `None` for no objectives.

    Raises:
        LoadTestError: there is no run, or its records are damaged.
    """
    return measure(read_run(out_dir), slo or NO_OBJECTIVES, usd_per_chip_hour)


def write_outputs(
    out_dir: Path,
    slo: ServiceLevel | None = None,
    usd_per_chip_hour: Mapping[str, float] | None = None,
    console: Console | None = None,
) -> ExitCode:
    """Writes scorecard and report beside the records in `out_dir` and prints the table.

    `console` is `None` for standard output. May be repeated; what it wrote is replaced.

    Raises:
        LoadTestError: there is no run, or its records are damaged.
    """
    run = read_run(out_dir)
    card = measure(run, slo or NO_OBJECTIVES, usd_per_chip_hour)
    (out_dir / SCORECARD_FILE).write_bytes(card.to_json())
    (out_dir / REPORT_FILE).write_text(report_page(card, run), encoding="utf-8")
    print_scorecard(card, console or Console())
    return ExitCode(card.verdict.exit_code)


def write_comparison(
    dir_a: Path,
    dir_b: Path,
    out_dir: Path | None,
    slo: ServiceLevel | None,
    seed: int,
    console: Console | None = None,
) -> ExitCode:
    """Compares the runs of two folders and prints what differs.

    `out_dir` is where JSON and page go, `None` for nowhere; `console` is `None` for standard
    output. Only an invalid run makes the exit code other than `OK`.

    Raises:
        LoadTestError: a folder has no run, or its records are damaged.
    """
    a, b = (NamedRun(str(folder), read_run(folder)) for folder in (dir_a, dir_b))
    comparison = compare(a, b, slo or NO_OBJECTIVES, seed)
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / COMPARISON_FILE).write_bytes(comparison.to_json())
        page = comparison_page(comparison)
        (out_dir / COMPARISON_PAGE_FILE).write_text(page, encoding="utf-8")
    print_comparison(comparison, console or Console())
    return comparison.exit_code
