"""Stages `cold_start` and `warm_start`: the application from nothing, and once more."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.first_run.application import (
    ServedApplication,
    fleet_of,
    is_running,
    log_tail,
    next_folder,
    num_linked,
    processes_of,
    start_application,
    stop_application,
)
from deployments.first_run.context import StageContext
from deployments.first_run.order import RunStage
from deployments.first_run.requests.asking import metric_sum
from deployments.first_run.results import Measurement, StageResult, judged
from deployments.first_run.stages.served_models import run_model
from deployments.status.reports import ReportedFleet

_POLL_S = 1.0
# Beyond it a larger batch or a longer prompt may end the process.
_MOST_MEMORY_RATIO = 0.8
_FEWEST_FOUND_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class _Started:
    """One start. `ready_s` is the time until its engines were ready; `None` if they were not."""

    application: ServedApplication
    measurements: tuple[Measurement, ...]
    ready_s: float | None


def cold_start(context: StageContext) -> StageResult:
    """Starts the application for the first time, and watches its memory."""
    found = _start(context, 1)
    return judged(RunStage.COLD_START, found.measurements, ready_s=found.ready_s)


def warm_start(context: StageContext) -> StageResult:
    """Ends the application and starts it again: programs and weights are here by now."""
    stop_application(context.served)
    started = _start(context, 2)
    measurements, application = list(started.measurements), started.application
    first = context.earlier[RunStage.COLD_START].facts.get("ready_s")
    if first is not None:
        measurements.append(Measurement("ready at the first start", "", f"{first:.1f} s"))
    found = metric_sum(application.url, "slicewise_programs_found_total")
    compiled = metric_sum(application.url, "slicewise_programs_compiled_total")
    if found is not None and compiled is not None and found + compiled > 0:
        ratio = found / (found + compiled)
        has_cache = run_model(context).config.compile_cache is not None
        measurements.append(
            Measurement(
                "programs found in the cache",
                f"at least {_FEWEST_FOUND_RATIO:.0%}" if has_cache else "",
                f"{ratio:.0%} of {found + compiled:.0f}",
                is_met=ratio >= _FEWEST_FOUND_RATIO if has_cache else None,
            )
        )
    return judged(RunStage.WARM_START, measurements, ready_s=started.ready_s)


def _start(context: StageContext, number: int) -> _Started:
    began_s = time.monotonic()
    folder = next_folder(context.scratch, number)
    application = start_application(context.settings, folder, context.address)
    context.keep_application(application)
    wanted = run_model(context).num_engines
    most_bytes = 0
    reached_s: dict[str, float] = {}
    while (linked := num_linked(fleet := fleet_of(application))) < wanted:
        for state in _states(fleet):
            reached_s.setdefault(state, time.monotonic() - began_s)
        most_bytes = max(most_bytes, _memory_bytes(application))
        if not is_running(application) or context.left_s < 0:
            break
        time.sleep(_POLL_S)
    ready_s = time.monotonic() - began_s
    most_bytes = max(most_bytes, _memory_bytes(application))
    words = f"{linked} after {ready_s:.1f} s"
    if linked < wanted:
        words += f": {log_tail(application)}"
    measurements = (
        Measurement("engines ready", f"{wanted}", words, is_met=linked >= wanted),
        *(
            Measurement(f"first engine seen {state}", "", f"after {at_s:.0f} s")
            for state, at_s in reached_s.items()
        ),
        *_of_memory(most_bytes),
    )
    return _Started(application, measurements, ready_s if linked >= wanted else None)


def _states(fleet: ReportedFleet | None) -> Iterator[str]:
    """Yields the states of all engines; a second apart, so that a short one may be missed."""
    for model in () if fleet is None else fleet.models:
        for engine in model.engines:
            if engine.state is not None:
                yield engine.state


def _memory_bytes(application: ServedApplication) -> int:
    """Returns the resident memory of the application's processes here, shared pages twice."""
    if application.address is not None:
        return 0
    total = 0
    for process in processes_of(application):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def _of_memory(most_bytes: int) -> list[Measurement]:
    if not most_bytes:
        return []
    limit = _memory_limit_bytes()
    ratio = most_bytes / limit
    return [
        Measurement(
            "most resident memory of all processes",
            f"below {_MOST_MEMORY_RATIO:.0%} of {limit / 2**30:.0f} GiB",
            f"{most_bytes / 2**30:.1f} GiB",
            is_met=ratio < _MOST_MEMORY_RATIO,
        )
    ]


def _memory_limit_bytes() -> int:
    """Returns what this machine, or the container on it, may use."""
    total: int = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(total, int(text))
    return total
