"""Turns what Serve carries to a policy into load and slices of one model.

Owns the reading of reports: which is the newest, which are late or missing, how those of several
gateways add up. A report that is missing is told by name, never a load of zero. Pure: no clock.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from autoscaling.records import ModelLoad, SliceLoss, SliceView
from serving.domain.capacity.batch_due import due_of_stats
from serving.domain.capacity.engine_rates import EngineRate, rates_of_stats
from serving.domain.capacity.slice_profile import ASSUMED_INPUT_TOKENS, ASSUMED_OUTPUT_TOKENS
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import (
    JUDGED,
    FleetReport,
    LoadSample,
    StatsError,
    fleet_report_of_stats,
    load_of_stats,
)
from serving.domain.slice_records import LEASE_S, RENEWAL_S

# A directory that has just started has not got every report yet.
SETTLING_S = LEASE_S + RENEWAL_S
# Of the age at which a load is none. Reports come every 2 s.
_LATE_SHARE = 1 / 3


class ReportMissingError(Exception):
    """The load or the slices are unknown now; the message gives the reason. Hold the last plan."""


class Point(Protocol):
    """The value that a replica recorded, at the wall-clock time of its host."""

    @property
    def timestamp(self) -> float:
        """The instant, in seconds since the epoch."""
        ...

    @property
    def value(self) -> float:
        """The recorded value."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """The last values that one replica reported, all at once."""

    at_s: float
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a request, on average."""

    input: float
    output: float


# Of a request until the first have been measured, where nothing else is set.
ASSUMED_TOKENS = Tokens(input=ASSUMED_INPUT_TOKENS, output=ASSUMED_OUTPUT_TOKENS)


def latest_reports(
    raw: Mapping[str, Mapping[Hashable, Sequence[Point]]],
) -> dict[Hashable, Report]:
    """The newest report of each replica, by replica id, from Serve's series by name and replica.

    Serve keeps a series for a while after its last point, so a name counts only if it is as new as
    the newest one of its replica. Serve's own series have no bar in their names.
    """
    newest: dict[Hashable, dict[str, Point]] = {}
    for name, by_replica in raw.items():
        if "|" in name:
            for replica, points in by_replica.items():
                if points:
                    newest.setdefault(replica, {})[name] = points[-1]
    reports = {}
    for replica, points_by_name in newest.items():
        at_s = max(point.timestamp for point in points_by_name.values())
        stats = {
            name: point.value for name, point in points_by_name.items() if point.timestamp == at_s
        }
        reports[replica] = Report(at_s, stats)
    return reports


class _Heard(NamedTuple):
    """The newest report of somebody, by its own clock, and when it was first seen, by ours."""

    at_s: float
    seen_s: float


def _heard(before: _Heard | None, at_s: float, now_s: float) -> _Heard:
    """Returns what was heard, with a report of `at_s`; of the first one counts what it says.

    A clock may have been set back: a report that is older is a new one, and none is of later.
    """
    if before is None:
        return _Heard(at_s, min(at_s, now_s))
    return _Heard(at_s, min(before.seen_s, now_s) if at_s == before.at_s else now_s)


class GatewayWatch:
    """When each running gateway last told a model's load, by the clock of who decides.

    A gateway's own clock may be wrong. So what counts is when a newer report was first seen; of the
    first one, and of none, it is what that says, and when the gateway was first seen.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._heard: dict[str, _Heard] = {}

    def look(self, now_s: float, gateways: Mapping[str, Report | None]) -> dict[str, float]:
        """Returns when each was heard of; `None` is a gateway that has not reported yet.

        A report without the model's load is none.
        """
        heard: dict[str, _Heard] = {}
        for name, report in gateways.items():
            before = self._heard.get(name)
            if report is None or load_of_stats(self._model, report.stats) is None:
                before = before or _Heard(-math.inf, now_s)
                heard[name] = _heard(before, before.at_s, now_s)
            else:
                heard[name] = _heard(before, report.at_s, now_s)
        self._heard = heard
        return {name: each.seen_s for name, each in heard.items()}


def load_of(
    model: str,
    gateways: Mapping[str, Report | None],
    heard_s: Mapping[str, float],
    now_s: float,
    max_age_s: float,
    assumed: Tokens,
) -> ModelLoad:
    """The model's load over the running gateways: rates and counts add up, means weigh by rate.

    A gateway that was not heard of for a third of `max_age_s` is late, and is not in the sum unless
    all are; one that was not for longer than `max_age_s` is left out. Both are said in words. The
    load is as old as its oldest part. `assumed` stands for a mean that no gateway knows yet.

    Raises:
        ReportMissingError: no gateway has told its load in time.
    """
    prompt: dict[str, LoadSample] = {}
    tardy: dict[str, LoadSample] = {}
    late: list[str] = []
    left_out: list[str] = []
    for name, report in gateways.items():
        sample = None if report is None else load_of_stats(model, report.stats)
        age_s = now_s - heard_s[name]
        if age_s > max_age_s:
            left_out.append(
                f"gateway {name} is left out: it has told no load for {age_s:.0f} s;"
                f" allowed: {max_age_s:g} s"
            )
        elif sample is None:
            late.append(f"gateway {name} is silent: it has told no load of {model}")
        elif age_s > _LATE_SHARE * max_age_s:
            late.append(f"gateway {name} is late: its load is {age_s:.0f} s old")
            tardy[name] = sample
        else:
            prompt[name] = sample
    known = prompt or tardy
    if not known:
        raise ReportMissingError("; ".join(late + left_out) or "no gateway runs")
    reports = [report for name in known if (report := gateways[name]) is not None]
    load = _sum_of(model, list(known.values()), reports, assumed)
    at_s = min(heard_s[name] for name in known)
    return replace(load, at_s=at_s, late=tuple(late), left_out=tuple(left_out))


def _sum_of(
    model: str, known: Sequence[LoadSample], reports: Sequence[Report], assumed: Tokens
) -> ModelLoad:
    return ModelLoad(
        at_s=0.0,
        requests_per_s=sum(sample.requests_per_s for sample in known),
        input_tokens_mean=_weighed(
            [(sample.input_tokens_mean, sample.requests_per_s) for sample in known], assumed.input
        ),
        output_tokens_mean=_weighed(
            [(sample.output_tokens_mean, sample.requests_per_s) for sample in known],
            assumed.output,
        ),
        num_waiting=sum(sample.num_waiting for sample in known),
        oldest_wait_s=max(sample.oldest_wait_s for sample in known),
        num_in_flight=sum(sample.num_in_flight for sample in known),
        batch_requests_per_s=sum(sample.batch_requests_per_s for sample in known),
        num_batch_waiting=sum(sample.num_batch_waiting for sample in known),
        num_batch_in_flight=sum(sample.num_batch_in_flight for sample in known),
        # Each tells of all batches; one that has just begun may know of fewer.
        batch_due=max(
            (due_of_stats(model, report.stats) for report in reports),
            key=lambda due: due.num_requests,
        ),
        # Gateways share the engines. Where nothing waits, nobody sees that they are full.
        full_ratio=max(sample.full_ratio for sample in known),
        **{what: sum(getattr(sample, what) for sample in known) for what in JUDGED},
        # Each engine is told of by one gateway at a time.
        engines=tuple(each for report in reports for each in rates_of_stats(model, report.stats)),
    )


class DirectoryWatch:
    """When the directory last told something new, by the clock of who decides.

    Its own clock may be wrong, as a gateway's may (`GatewayWatch`).
    """

    def __init__(self) -> None:
        self._heard: _Heard | None = None

    def look(self, now_s: float, reports: Iterable[Report]) -> float | None:
        """Returns when it was heard of last; `None` before its first report."""
        at_s = max((report.at_s for report in reports), default=None)
        if at_s is None and self._heard is not None:
            at_s = self._heard.at_s
        if at_s is None:
            return None
        self._heard = _heard(self._heard, at_s, now_s)
        return self._heard.seen_s


def fleet_report_of(
    reports: Iterable[Report], now_s: float, max_age_s: float, heard_s: float | None = None
) -> FleetReport:
    """Returns what the directory lists, which was heard of at `heard_s`; `None`: as it says itself.

    Raises:
        ReportMissingError: it lists nothing, nothing new, or lacks reports.
    """
    newest = max(reports, key=lambda report: report.at_s, default=None)
    if newest is None:
        raise ReportMissingError("the directory tells no slices")
    age_s = now_s - (newest.at_s if heard_s is None else heard_s)
    if age_s > max_age_s:
        raise ReportMissingError(
            f"the directory's list is {age_s:.0f} s old; allowed: {max_age_s:g} s"
        )
    try:
        report = fleet_report_of_stats(newest.stats)
    except StatsError as error:
        raise ReportMissingError(str(error)) from error
    if report is None:
        raise ReportMissingError("the directory tells no slices")
    if newest.at_s - report.started_at_s < SETTLING_S:
        raise ReportMissingError("the directory has just started and may not know every slice")
    return report


def slices_of(
    model: str,
    report: FleetReport,
    terms: Mapping[str, ComputeClass],
    engines: Iterable[EngineRate] = (),
) -> tuple[SliceView, ...]:
    """The model's slices on the classes of `terms`, ordered by id.

    `engines` are those whose work is known, in what a whole slice does if all on it do the same.
    A slice's expiry is the one that its hosts tell. Where they do not know it, it counts from when
    the replica got the slice, so it is the latest that it can be.
    """
    running = {each.engine_id: each.num_running for each in engines}
    views = []
    for each in report.slices:
        if each.model != model or each.compute_class not in terms:
            continue
        max_run_s = terms[each.compute_class].max_run_s
        expires_at_s = each.ends_at_s
        if expires_at_s is None and max_run_s is not None and each.held_since_s is not None:
            expires_at_s = each.held_since_s + max_run_s
        told = [running[name] for name in each.engine_ids if name in running]
        views.append(
            SliceView(
                slice_id=each.replica_id,
                compute_class=each.compute_class,
                state=each.state,
                since_s=each.since_s,
                requested_at_s=each.requested_at_s,
                num_in_flight=round(sum(told) / len(told)) if told else 0,
                expires_at_s=expires_at_s,
                coming_since_s=each.coming_since_s,
                is_adopted=each.is_adopted,
            )
        )
    return tuple(sorted(views, key=lambda view: view.slice_id))


def losses_of(model: str, report: FleetReport) -> tuple[SliceLoss, ...]:
    """The model's losses that the directory still reports, oldest first."""
    losses = [
        SliceLoss(each.replica_id, each.compute_class, each.at_s, str(each.cause))
        for each in report.losses
        if each.model == model
    ]
    return tuple(sorted(losses, key=lambda loss: (loss.at_s, loss.slice_id)))


def _weighed(values: Sequence[tuple[float | None, float]], otherwise: float) -> float:
    """The mean of the known values, by weight where any has weight."""
    known = [(value, weight) for value, weight in values if value is not None]
    if not known:
        return otherwise
    total = sum(weight for _, weight in known)
    if total <= 0:
        return sum(value for value, _ in known) / len(known)
    return sum(value * weight for value, weight in known) / total
