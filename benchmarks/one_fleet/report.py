"""The tables of `docs/results/one-fleet.md`."""

import datetime
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from benchmarks.ingress_report import present_commit
from benchmarks.measured_part import with_measured
from benchmarks.one_fleet import quota_days, shape_days
from benchmarks.one_fleet.quota_days import CHAT, CODE, RESERVED
from benchmarks.one_fleet.records import (
    RECORD,
    REPORT,
    DayRun,
    ModelDay,
    Part,
    Record,
    read_record,
    write_record,
)
from benchmarks.one_fleet.shape_days import LARGE, MODEL, SMALL

_QUOTAS = (
    "| | | chat, SLO % | chat, TTFT p99 s | code, SLO % | code, TTFT p99 s | reserved slice-hours"
    " | bought USD | slices begun |"
)
# What is simulated for each table: how, and of what.
_PARTS: Mapping[str, tuple[Any, ...]] = {
    "quotas": (
        quota_days.run_of,
        *zip(*itertools.product(quota_days.CASES, quota_days.WAYS, quota_days.SEEDS), strict=True),
    ),
    "shapes": (
        shape_days.run_of,
        *zip(*itertools.product(shape_days.CASES, shape_days.WAYS, shape_days.SEEDS), strict=True),
    ),
}
_SHAPES = "| mean work | shapes | SLO % | TTFT p99 s | USD | 2x2-hours | 2x4-hours | slices begun |"


def run_parts(only: str | None, say: Callable[[str], None]) -> None:
    """Simulates the days of these tables, as many at once as there are cores; `None`: of all.

    Raises:
        ValueError: there is no such table.
    """
    names = tuple(_PARTS) if only is None else tuple(only.split(","))
    if unknown := set(names) - set(_PARTS):
        raise ValueError(f"only={', '.join(sorted(unknown))}; allowed: {', '.join(_PARTS)}")
    for name in names:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            runs = []
            for run in pool.map(*_PARTS[name]):
                runs.append(run)
                say(f"{run}")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        part = Part(today, present_commit(), runs)
        write_record(msgspec.structs.replace(read_record(), **{name: part}))
    write_report()
    say(f"written: {RECORD}, {REPORT}")


def write_report() -> None:
    """Writes the tables of what is on record into `REPORT`."""
    page = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(updated(page, read_record()), encoding="utf-8")


def updated(page: str, record: Record) -> str:
    """Returns the page with the tables of `record`; raises as `with_measured`."""
    return with_measured(page, lambda: "\n".join(_measured(record)))


def _measured(record: Record) -> Iterator[str]:
    yield from ("### Two models under one quota", "", _conditions("quotas", record.quotas), "")
    yield from _head(_QUOTAS)
    for case in quota_days.CASES:
        for way in quota_days.WAYS:
            runs = _of(record.quotas.runs, case.name, way.name)
            yield f"| {case.name} | {way.name} | {' | '.join(_quota_cells(runs))} |"
    yield from ("", "### 2x2 beside 2x4", "", _conditions("shapes", record.shapes), "")
    yield from _head(_SHAPES)
    for shape_case in shape_days.CASES:
        for shape_way in shape_days.WAYS:
            runs = _of(record.shapes.runs, shape_case.name, shape_way.name)
            yield f"| {shape_case.name} | {shape_way.name} | {' | '.join(_shape_cells(runs))} |"


def _conditions(name: str, part: Part) -> str:
    seeds = sorted({each.seed for each in part.runs})
    return (
        f"Simulated on {part.date} at {part.commit} by `python -m benchmarks one-fleet --only"
        f" {name}`, seeds {', '.join(map(str, seeds))}: the mean (lowest to highest)."
    )


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
