"""The table of `docs/results/shared-quota.md`."""

import datetime
import statistics
from collections.abc import Callable, Sequence

from benchmarks.ingress_report import present_commit
from benchmarks.measured_part import with_measured
from benchmarks.shared_quota.days import CASES, CHAT, CODE, SEEDS, WAYS, run_of
from benchmarks.shared_quota.records import (
    RECORD,
    REPORT,
    DayRun,
    ModelDay,
    Record,
    read_record,
    write_record,
)

_HEAD = (
    "| | | chat, SLO % | chat, TTFT p99 s | code, SLO % | code, TTFT p99 s | reserved slice-hours"
    " | bought USD | slices begun |"
)


def run_all(say: Callable[[str], None]) -> None:
    """Simulates every day, puts them on record and writes the page."""
    runs = []
    for case in CASES:
        for way in WAYS:
            for seed in SEEDS:
                runs.append(run_of(case, way, seed))
                say(f"{runs[-1]}")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_record(Record(today, present_commit(), runs))
    write_report()
    say(f"written: {RECORD}, {REPORT}")


def write_report() -> None:
    """Writes the table of what is on record into `REPORT`."""
    page = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(updated(page, read_record()), encoding="utf-8")


def updated(page: str, record: Record) -> str:
    """Returns the page with the table of `record`; raises as `with_measured`."""
    return with_measured(page, lambda: _measured(record))


def _measured(record: Record) -> str:
    seeds = sorted({each.seed for each in record.runs})
    lines = [
        f"Simulated on {record.date} at {record.commit} by `python -m benchmarks shared-quota`,"
        f" seeds {', '.join(map(str, seeds))}: the mean (lowest to highest).",
        "",
        _HEAD,
        "|" + "---|" * (_HEAD.count("|") - 1),
    ]
    for case in CASES:
        for way in WAYS:
            runs = [it for it in record.runs if (it.case, it.way) == (case.name, way.name)]
            lines.append(f"| {case.name} | {way.name} | {' | '.join(_cells(runs))} |")
    return "\n".join(lines)


def _cells(runs: Sequence[DayRun]) -> list[str]:
    def of(model: str, figure: Callable[[ModelDay], float], shown: str) -> str:
        return _cell([figure(each.models[model]) for each in runs], shown)

    def both(figure: Callable[[ModelDay], float], shown: str) -> str:
        return _cell([sum(map(figure, each.models.values())) for each in runs], shown)

    return [
        of(CHAT, lambda day: 100 * day.slo_ratio, ".2f"),
        of(CHAT, lambda day: day.ttft_p99_s, ".1f"),
        of(CODE, lambda day: 100 * day.slo_ratio, ".2f"),
        of(CODE, lambda day: day.ttft_p99_s, ".1f"),
        both(lambda day: day.reserved_slice_hours, ".0f"),
        both(lambda day: day.bought_usd, ",.0f"),
        both(lambda day: day.num_slices_begun, ".0f"),
    ]


def _cell(values: Sequence[float], shown: str) -> str:
    mean = format(statistics.fmean(values), shown)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), shown)} to {format(max(values), shown)})"
