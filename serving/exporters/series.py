"""The values on their way to the page: decoded points, and the series of one scrape.

Owns the records between decoding and labelling, and the arithmetic of histograms. Ensures that a
series is on the page once, that the best source of a chip's metric is the only one, and that no
metric has more label sets than the registry allows. Does not own where values come from. Pure.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from serving.exporters.collector import Code
from serving.telemetry.metric_names import ALL, MAX_BUCKETS, Unit, labels_of

Labels = tuple[tuple[str, str], ...]

# A share of time or of a peak that is a little above 1 is a matter of rounding; more is a fault.
MAX_RATIO = 1.05


class BadValueError(ValueError):
    """The number cannot be meant. Drop the sample and count it."""


class BadDistributionError(ValueError):
    """The histogram contradicts itself. Drop it and count it."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """The cumulative counts by finite upper bound, rising; `count` and `total` of all values."""

    buckets: tuple[tuple[float, int], ...]
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The value of one metric of ours.

    `device` is the source's number of the device, `None` for a value of the whole host. `labels`
    are the metric's own, without those of chip, host and workload.
    """

    metric: str
    value: float | HistogramValue
    device: int | None = None
    labels: Labels = ()


@dataclass(slots=True)
class Decoded:
    """The points of an answer, and the count of each problem, also of those found in composing.

    Devices of `ordinals` are numbered either within the slice or within the host; the whole set
    decides. Those of `points` are numbered within the slice, those of `host_points` within the
    host.
    """

    points: list[MetricPoint] = field(default_factory=list)
    ordinals: list[MetricPoint] = field(default_factory=list)
    host_points: list[MetricPoint] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)


def checked_number(metric: str, value: float) -> float:
    """Returns the value itself, which is in the metric's unit.

    Raises:
        BadValueError: not a finite number, negative, or a ratio above `MAX_RATIO`.
    """
    is_ratio = ALL[metric].unit == Unit.RATIO
    if not math.isfinite(value) or value < 0 or (is_ratio and value > MAX_RATIO):
        raise BadValueError(f"{value}")
    return value


def histogram(
    bounds: Sequence[float], counts: Sequence[int], count: int, mean: float, divisor: float
) -> HistogramValue:
    """Returns a histogram in our unit; a value of theirs divided by `divisor` is ours.

    `counts` are of single buckets, the last one of what is above every bound. Zeros at the end may
    be missing.

    Raises:
        BadDistributionError: bounds that do not rise, counts without a bound, counts that are
            negative or do not add up to `count`.
    """
    if len(counts) > len(bounds) + 1:
        raise BadDistributionError("more counts than buckets")
    if any(not low < high for low, high in pairwise(bounds)):
        raise BadDistributionError("bounds do not rise")
    if not all(map(math.isfinite, (*bounds, mean))):
        raise BadDistributionError("not a number")
    if any(in_bucket < 0 for in_bucket in counts) or sum(counts) != count:
        raise BadDistributionError("counts do not add up")
    padded = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
    cumulative = []
    so_far = 0
    for bound, in_bucket in zip(bounds, padded, strict=False):
        so_far += in_bucket
        cumulative.append((bound / divisor, so_far))
    return HistogramValue(tuple(cumulative), count, mean * count / divisor)


def thinned(full: HistogramValue, max_buckets: int) -> HistogramValue:
    """Returns the histogram with at most that many finite bounds, the last among them.

    The choice of bounds depends on their number and on nothing else, so that a series neither comes
    nor goes with the traffic. The remaining counts are exact.
    """
    num_buckets = len(full.buckets)
    if num_buckets <= max_buckets:
        return full
    step = math.ceil(num_buckets / max_buckets)
    kept = full.buckets[(num_buckets - 1) % step :: step]
    return HistogramValue(kept, full.count, full.total)


@dataclass(frozen=True, slots=True)
class Series:
    """The series of one metric on the page. `labels` are in the registry's order; none is empty."""

    metric: str
    labels: Labels
    value: float | HistogramValue


@dataclass(slots=True)
class SeriesCollector:
    """Collects the series of a page, each once and within limits. `host_labels` go on all."""

    host_labels: Labels
    _series: dict[tuple[str, Labels], Series] = field(default_factory=dict)
    _rank_by_series: dict[tuple[str, Labels], int] = field(default_factory=dict)
    _rank_by_chip: dict[tuple[str, str], int] = field(default_factory=dict)
    _num_sets: Counter[tuple[str, Labels]] = field(default_factory=Counter)

    @property
    def series(self) -> tuple[Series, ...]:
        """The series that were taken in."""
        return tuple(self._series.values())

    def add(self, point: MetricPoint, scope_labels: Mapping[str, str], rank: int) -> Code | None:
        """Takes a value in; returns `None`, or the code of what is wrong with it.

        `scope_labels` are those of its chip or collector. A value that a source of another `rank`
        has given already is no problem; it is only not needed.
        """
        chip = scope_labels.get("chip")
        # By chip alone: one source may give by device what another gives by chip.
        if chip is not None and self._rank_by_chip.setdefault((point.metric, chip), rank) != rank:
            return None
        labels = self._ordered(point.metric, {**scope_labels, **dict(point.labels)})
        key = (point.metric, labels)
        if key in self._series:
            return Code.CONFLICT if self._rank_by_series[key] == rank else None
        scope = (point.metric, self._ordered(point.metric, scope_labels))
        if self._num_sets[scope] >= ALL[point.metric].max_sets:
            return Code.LABEL_LIMIT
        self._num_sets[scope] += 1
        self._rank_by_series[key] = rank
        value = point.value
        if isinstance(value, HistogramValue):
            value = thinned(value, MAX_BUCKETS)
        self._series[key] = Series(point.metric, labels, value)
        return None

    def add_own(self, metric: str, value: float, **labels: str) -> None:
        """Puts a series of the exporter's own on the page."""
        ordered = self._ordered(metric, labels)
        self._series[metric, ordered] = Series(metric, ordered, value)

    def _ordered(self, metric: str, labels: Mapping[str, str]) -> Labels:
        every = {**dict(self.host_labels), **labels}
        return tuple((name, every[name]) for name in labels_of(ALL[metric]) if every.get(name))
