"""The tables of `docs/results/one-fleet.md`."""

import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.ingress_report import present_commit
from benchmarks.measured_part import with_measured
from benchmarks.one_fleet import quota_days, shape_days
from benchmarks.one_fleet.quota_days import CHAT, CODE, RESERVED
from benchmarks.one_fleet.records import (
    RECORD,
    REPORT,
    DayRun,
    ModelDay,
    Record,
    read_record,
    write_record,
)
from benchmarks.one_fleet.shape_days import LARGE, MODEL, SMALL

_QUOTAS = (
    "| | | chat, SLO % | chat, TTFT p99 s | code, SLO % | code, TTFT p99 s | reserved slice-hours"
    " | bought USD | slices begun |"
)
_SHAPES = "| mean work | shapes | SLO % | TTFT p99 s | USD | 2x2-hours | 2x4-hours | slices begun |"


def run_all(say: Callable[[str], None]) -> None:
    """Simulates every day, puts them on record and writes the page."""
    quotas = [
        _said(quota_days.run_of(case, way, seed), say)
        for case in quota_days.CASES
        for way in quota_days.WAYS
        for seed in quota_days.SEEDS
    ]
    shapes = [
        _said(shape_days.run_of(case, way, seed), say)
        for case in shape_days.CASES
        for way in shape_days.WAYS
        for seed in shape_days.SEEDS
    ]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_record(Record(today, present_commit(), quotas, shapes))
    write_report()
    say(f"written: {RECORD}, {REPORT}")


def write_report() -> None:
    """Writes the tables of what is on record into `REPORT`."""
    page = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(updated(page, read_record()), encoding="utf-8")


def updated(page: str, record: Record) -> str:
    """Returns the page with the tables of `record`; raises as `with_measured`."""
    return with_measured(page, lambda: "\n".join(_measured(record)))


def _said(run: DayRun, say: Callable[[str], None]) -> DayRun:
    say(f"{run}")
    return run


def _measured(record: Record) -> Iterator[str]:
    seeds = sorted({each.seed for each in (*record.quotas, *record.shapes)})
    yield (
        f"Simulated on {record.date} at {record.commit} by `python -m benchmarks one-fleet`,"
        f" seeds {', '.join(map(str, seeds))}: the mean (lowest to highest)."
    )
    yield from ("", "### Two models under one quota", "")
    yield from _head(_QUOTAS)
    for case in quota_days.CASES:
        for way in quota_days.WAYS:
            runs = _of(record.quotas, case.name, way.name)
            yield f"| {case.name} | {way.name} | {' | '.join(_quota_cells(runs))} |"
    yield from ("", "### 2x2 beside 2x4", "")
    yield from _head(_SHAPES)
    for shape_case in shape_days.CASES:
        for shape_way in shape_days.WAYS:
            runs = _of(record.shapes, shape_case.name, shape_way.name)
            yield f"| {shape_case.name} | {shape_way.name} | {' | '.join(_shape_cells(runs))} |"


def _head(titles: str) -> tuple[str, str]:
    return titles, "|" + "---|" * (titles.count("|") - 1)


def _of(runs: Sequence[DayRun], case: str, way: str) -> list[DayRun]:
    return [each for each in runs if (each.case, each.way) == (case, way)]


def _quota_cells(runs: Sequence[DayRun]) -> list[str]:
    def of(model: str, figure: Callable[[ModelDay], float], shown: str) -> str:
        return _cell([figure(each.models[model]) for each in runs], shown)

    def both(figure: Callable[[ModelDay], float], shown: str) -> str:
        return _cell([sum(map(figure, each.models.values())) for each in runs], shown)

    return [
        of(CHAT, lambda day: 100 * day.slo_ratio, ".2f"),
        of(CHAT, lambda day: day.ttft_p99_s, ".1f"),
        of(CODE, lambda day: 100 * day.slo_ratio, ".2f"),
        of(CODE, lambda day: day.ttft_p99_s, ".1f"),
        both(lambda day: day.slice_hours.get(RESERVED, 0.0), ".0f"),
        both(lambda day: day.bought_usd, ",.0f"),
        both(lambda day: day.num_slices_begun, ".0f"),
    ]


def _shape_cells(runs: Sequence[DayRun]) -> list[str]:
    days = [each.models[MODEL] for each in runs]

    def hours(shape: str) -> list[float]:
        return [
            sum(count for name, count in day.slice_hours.items() if name.endswith(shape))
            for day in days
        ]

    return [
        _cell([100 * day.slo_ratio for day in days], ".2f"),
        _cell([day.ttft_p99_s for day in days], ".2f"),
        _cell([day.bought_usd for day in days], ",.0f"),
        _cell(hours(SMALL), ".0f"),
        _cell(hours(LARGE), ".0f"),
        _cell([day.num_slices_begun for day in days], ".0f"),
    ]


def _cell(values: Sequence[float], shown: str) -> str:
    mean = format(statistics.fmean(values), shown)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), shown)} to {format(max(values), shown)})"
