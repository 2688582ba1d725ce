"""Stages `cold_start` and `warm_start`: the application from nothing, and once more."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.first_run.application import (
    ServedApplication,
    fleet_of,
    is_running,
    log_tail,
    next_folder,
    num_linked,
    start_application,
    stop_application,
)
from deployments.first_run.context import StageContext
from deployments.first_run.hosts.node_processes import OF_THIS_NODE
from deployments.first_run.hosts.reach import hosts_of
from deployments.first_run.order import RunStage
from deployments.first_run.requests.asking import metric_sum
from deployments.first_run.results import Measurement, StageResult, judged
from deployments.first_run.stages.memory_watch import MemoryWatch
from deployments.first_run.stages.served_models import run_model
from deployments.status.reports import ReportedFleet

_POLL_S = 1.0
# An engine reports a moment after it is ready.
_REPORTED_S = 15.0
FOUND_PROGRAMS = "programs found in the cache"
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
    if started.ready_s is not None:
        has_cache = run_model(context).config.compile_cache is not None
        measurements += found_in_cache(*_programs(context, application), has_cache=has_cache)
    return judged(RunStage.WARM_START, measurements, ready_s=started.ready_s)


def _programs(
    context: StageContext, application: ServedApplication
) -> tuple[float | None, float | None]:
    """Returns how many programs were found and how many compiled; `None`: not told."""
    until_s = time.monotonic() + min(_REPORTED_S, context.left_s)
    is_told = run_model(context).config.is_on_tpu
    while True:
        found = metric_sum(application.url, "slicewise_programs_found_total")
        compiled = metric_sum(application.url, "slicewise_programs_compiled_total")
        is_here = found is not None and compiled is not None
        if is_here or not is_told or time.monotonic() > until_s:
            return found, compiled
        time.sleep(_POLL_S)


def found_in_cache(
    found: float | None, compiled: float | None, *, has_cache: bool
) -> list[Measurement]:
    """Returns how many of the programs of a start came from the cache. Pure.

    It is judged where the model has a cache, and then a number that is not told is a fault. Engines
    that compile nothing tell none: `found` and `compiled` are `None`.
    """
    what, expected = FOUND_PROGRAMS, f"at least {_FEWEST_FOUND_RATIO:.0%}"
    if found is None or compiled is None:
        return [Measurement(what, expected, "not told", is_met=False)] if has_cache else []
    if not found + compiled:
        return [Measurement(what, "", "none was needed")]
    ratio = found / (found + compiled)
    words = f"{ratio:.0%} of {found + compiled:.0f}"
    if not has_cache:
        return [Measurement(what, "", words)]
    return [Measurement(what, expected, words, is_met=ratio >= _FEWEST_FOUND_RATIO)]


def _start(context: StageContext, number: int) -> _Started:
    began_s = time.monotonic()
    folder = next_folder(context.scratch, number)
    application = start_application(context.settings, folder, context.address)
    context.keep_application(application)
    wanted = run_model(context).num_engines
    place = OF_THIS_NODE if context.address is not None else f"{folder}/"
    memory = MemoryWatch(hosts_of(context.address), place)
    reached_s: dict[str, float] = {}
    while (linked := num_linked(fleet := fleet_of(application))) < wanted:
        for state in _states(fleet):
            reached_s.setdefault(state, time.monotonic() - began_s)
        if not is_running(application) or context.left_s < 0:
            break
        time.sleep(_POLL_S)
    ready_s = time.monotonic() - began_s
    words = f"{linked} after {ready_s:.1f} s"
    if linked < wanted:
        words += f": {log_tail(application)}"
    measurements = (
        Measurement("engines ready", f"{wanted}", words, is_met=linked >= wanted),
        *(
            Measurement(f"first engine seen {state}", "", f"after {at_s:.0f} s")
            for state, at_s in reached_s.items()
        ),
        *memory.end(context.until_s),
    )
    return _Started(application, measurements, ready_s if linked >= wanted else None)


def _states(fleet: ReportedFleet | None) -> Iterator[str]:
    """Yields the states of all engines; a second apart, so that a short one may be missed."""
    for model in () if fleet is None else fleet.models:
        for engine in model.engines:
            if engine.state is not None:
                yield engine.state
