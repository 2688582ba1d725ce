"""Checks that a run's numbers describe the server, and not the client that took them. Pure.

A gate without its measurement fails: a client that did not watch itself proves nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loadtest.histogram import added, quantile
from loadtest.records import ClientSample
from loadtest.scorecard.formats import format_ratio, format_seconds
from loadtest.scorecard.latency import schedule_lag_s
from loadtest.scorecard.slo import ClientGates
from loadtest.scorecard.spread import percentile
from loadtest.scorecard.stored_run import StoredRun


@dataclass(frozen=True, slots=True)
class Gate:
    """The result of one condition on the client; `value` is `None` when it was not measured."""

    name: str
    value: float | None
    limit: float
    is_floor: bool
    ok: bool
    words: str


@dataclass(frozen=True, slots=True)
class ClientReport:
    """The verdict on the client; `reasons` are why it is invalid. `num_workers` sent samples."""

    valid: bool
    reasons: tuple[str, ...]
    gates: tuple[Gate, ...]
    num_workers: int


def check_client(run: StoredRun, gates: ClientGates) -> ClientReport:
    """Returns every gate that applies to `run`. Of several workers the worst one counts."""
    from_s = run.start.warmup_s
    by_worker: dict[int, list[ClientSample]] = {}
    for sample in run.client:
        if sample.at_s >= from_s:
            by_worker.setdefault(sample.worker, []).append(sample)
    is_watched = len(by_worker) >= run.start.num_workers
    watched = list(by_worker.values()) if is_watched else []
    lags_s = sorted(schedule_lag_s(request) for request in run.judged)
    checked = [
        _ceiling(
            "loop lag p99",
            _worst(_loop_lag_p99_s(samples) for samples in watched),
            gates.loop_lag_p99_s,
            format_seconds,
        ),
        _ceiling(
            "schedule lag p99", percentile(lags_s, 0.99), gates.schedule_lag_p99_s, format_seconds
        ),
        _ceiling(
            "CPU p90, share of a core",
            _worst(_cpu_p90(samples) for samples in watched),
            gates.cpu_p90_ratio,
            format_ratio,
        ),
    ]
    if run.start.num_scheduled is not None:
        checked.append(_rate_gate(run, gates))
    reasons = tuple(gate.words for gate in checked if not gate.ok)
    return ClientReport(not reasons, reasons, tuple(checked), len(by_worker))


def num_sent_in_time(run: StoredRun, grace_s: float) -> int:
    """Counts judged requests sent before the schedule was over, or `grace_s` after it."""
    until_s = run.start.duration_s + grace_s
    return sum(request.sent_s <= until_s for request in run.judged)


def _rate_gate(run: StoredRun, gates: ClientGates) -> Gate:
    asked = len(run.judged) + run.num_missing
    # What is due in the last milliseconds is not late by being sent just after them.
    sent = num_sent_in_time(run, gates.schedule_lag_p99_s)
    value = sent / asked if asked else None
    is_met = value is not None and value >= gates.min_rate_ratio
    words = f"achieved over asked rate {format_ratio(value)}"
    words += f", at least {format_ratio(gates.min_rate_ratio)}"
    name, limit = "achieved over asked rate", gates.min_rate_ratio
    return Gate(name, value, limit, is_floor=True, ok=is_met, words=words)


def _ceiling(
    name: str, value: float | None, limit: float, shown: Callable[[float | None], str]
) -> Gate:
    is_met = value is not None and value <= limit
    words = f"{name} {shown(value)}" if value is not None else f"{name} was not measured"
    words += f", at most {shown(limit)}"
    return Gate(name, value, limit, is_floor=False, ok=is_met, words=words)


def _loop_lag_p99_s(samples: list[ClientSample]) -> float | None:
    return quantile(added(sample.loop_lag_counts for sample in samples), 0.99)


def _cpu_p90(samples: list[ClientSample]) -> float | None:
    return percentile(sorted(sample.cpu_ratio for sample in samples), 0.90)


def _worst(values: Iterable[float | None]) -> float | None:
    """The largest; `None` if any is not known."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return max(known) if known and len(known) == len(listed) else None
