"""The table of `docs/results/provisioner.md`, and the record of the runs beside it."""

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measured_part import with_measured
from benchmarks.provisioner import Phase, Run

REPORT = Path(__file__).resolve().parents[1] / "docs/results/provisioner.md"
RECORD = REPORT.with_suffix(".json")


def write_report(runs: Sequence[Run], commit: str) -> None:
    """Writes `RECORD`, and the table into `REPORT`; raises as `updated`."""
    today = datetime.datetime.now(datetime.UTC).date()
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    where = f"Measured on {today}, {machine}, Python {platform.python_version()}, commit {commit}."
    RECORD.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    REPORT.write_text(updated(REPORT.read_text(encoding="utf-8"), where, runs), encoding="utf-8")


def updated(page: str, where: str, runs: Sequence[Run]) -> str:
    """The page with the table of `runs` in place of its old one; `where` is the sentence above it.

    Raises:
        ValueError: the lines that it stands between are not there.
    """
    return with_measured(page, lambda: f"{where}\n\n{table(runs)}")


def table(runs: Sequence[Run]) -> str:
    """A row for each figure: the median of the runs, and their range."""
    wish_s = sorted(delay_s for run in runs for delay_s in run.wish_s)
    rows = [
        ("pods", _of(runs, lambda run: run.num_pods, "{:,.0f}")),
        ("bytes of a pod as the API returns it", _of(runs, lambda run: run.pod_bytes, "{:,.0f}")),
        ("peak memory of the process, MiB", _of(runs, lambda run: run.touched.peak_mib, "{:.0f}")),
        ("- after the first list", _of(runs, lambda run: run.start.peak_mib, "{:.0f}")),
        (
            "- after another list of everything",
            _of(runs, lambda run: run.relist.peak_mib, "{:.0f}"),
        ),
        ("memory while idle, MiB", _of(runs, lambda run: run.idle_rss_mib, "{:.0f}")),
        ("seconds idle", _of(runs, lambda run: run.idle.seconds, "{:.0f}")),
        ("CPU while idle, of one core", _of(runs, lambda run: _share(run.idle), "{:.2%}")),
        ("the page for Prometheus, bytes", _of(runs, lambda run: run.page_bytes, "{:,.0f}")),
        ("API calls per minute while idle", _of(runs, lambda run: run.calls_per_minute, "{:.1f}")),
        ("start to the open watches, s", _of(runs, lambda run: run.start.seconds, "{:.1f}")),
        ("- CPU, s", _of(runs, lambda run: run.start.cpu_s, "{:.2f}")),
        ("cut, 410 and another list: CPU, s", _of(runs, lambda run: run.relist.cpu_s, "{:.2f}")),
        (
            "a change of every pod's status: CPU, s",
            _of(runs, lambda run: run.touched.cpu_s, "{:.2f}"),
        ),
        (
            f"a wish to the changed count, s, {len(wish_s)} wishes",
            f"{statistics.median(wish_s):.2f} ({wish_s[0]:.2f} to {wish_s[-1]:.2f})",
        ),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join([f"| figure | median of {len(runs)} runs (range) |", "|---|---|", *lines])


def _of(runs: Sequence[Run], figure: Callable[[Run], float], form: str) -> str:
    values = sorted(figure(run) for run in runs)
    shown = [form.format(value) for value in (statistics.median(values), values[0], values[-1])]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _share(phase: Phase) -> float:
    return phase.cpu_s / phase.seconds
