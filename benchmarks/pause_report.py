"""The table of `docs/results/pause.md`: how long streams stood still, kill by kill."""

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ingress_report import present_commit
from benchmarks.measured_part import with_measured
from benchmarks.pause import Pause

REPORT = Path(__file__).resolve().parents[1] / "docs/results/pause.md"


def write_report(pauses: Sequence[Pause]) -> None:
    """Puts the table into `REPORT`; raises as `updated`."""
    page = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(updated(page, pauses, present_commit()), encoding="utf-8")


def updated(page: str, pauses: Sequence[Pause], commit: str) -> str:
    """Returns the page with the table of these pauses in place of the old one.

    Raises:
        ValueError: the lines that it stands between are not there.
    """
    return with_measured(page, lambda: f"{_conditions(commit)}\n\n{_table(pauses)}")


def _conditions(commit: str) -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"Measured on {today} at {commit}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"Python {platform.python_version()}."
    )


def _table(pauses: Sequence[Pause]) -> str:
    lines = [
        "| kill | pause of moved streams, median / longest ms "
        "| longest gap before the kill ms | prefill of as many tokens, under load, ms |",
        "|---|---|---|---|",
    ]
    for number, pause in enumerate(pauses, 1):
        lines.append(
            f"| {number} | {statistics.median(pause.moved_s) * 1e3:.0f} / "
            f"{max(pause.moved_s) * 1e3:.0f} | {pause.usual_s * 1e3:.0f} "
            f"| {pause.prefill_s * 1e3:.0f} |"
        )
    median = statistics.median(max(pause.moved_s) for pause in pauses)
    prefill = statistics.median(pause.prefill_s for pause in pauses)
    lines.append(f"| median | longest: {median * 1e3:.0f} | | {prefill * 1e3:.0f} |")
    return "\n".join(lines)
