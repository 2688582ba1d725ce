"""The series of one scrape while they are gathered: labels, rivals and limits.

Owns that a series is on the page once, that the best source of a chip's metric is the only one, and
that no metric has more label sets than the registry says. Does not own where values come from.
Pure.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.exporters.points import Histogram, Point, thinned
from serving.exporters.readings import Code
from serving.telemetry.metric_names import ALL, MAX_BUCKETS, labels_of

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One series of the page. `labels` are in the registry's order; none is empty."""

    metric: str
    labels: Labels
    value: float | Histogram


@dataclass(slots=True)
class Board:
    """Takes values in and refuses some. `host_labels` go on every series."""

    host_labels: Labels
    _series: dict[tuple[str, Labels], Series] = field(default_factory=dict)
    _shown_by: dict[tuple[str, Labels], int] = field(default_factory=dict)
    _claimed_by: dict[tuple[str, str], int] = field(default_factory=dict)
    _num_sets: Counter[tuple[str, Labels]] = field(default_factory=Counter)

    @property
    def series(self) -> tuple[Series, ...]:
        """Everything that was taken in."""
        return tuple(self._series.values())

    def show(self, point: Point, scope_labels: Mapping[str, str], rank: int) -> Code | None:
        """Takes a value in; `None`, or the code of what is wrong with it.

        `scope_labels` are those of its chip or collector. Of a value that a source of another
        `rank` has given already nothing is wrong, it is only not wanted.
        """
        chip = scope_labels.get("chip")
        # By chip alone: one source may give by device what another gives by chip.
        if chip is not None and self._claimed_by.setdefault((point.metric, chip), rank) != rank:
            return None
        labels = self._ordered(point.metric, {**scope_labels, **dict(point.labels)})
        key = (point.metric, labels)
        if key in self._series:
            return Code.CONFLICT if self._shown_by[key] == rank else None
        whose = (point.metric, self._ordered(point.metric, scope_labels))
        if self._num_sets[whose] >= ALL[point.metric].max_sets:
            return Code.LABEL_LIMIT
        self._num_sets[whose] += 1
        self._shown_by[key] = rank
        value = point.value
        if isinstance(value, Histogram):
            value = thinned(value, MAX_BUCKETS)
        self._series[key] = Series(point.metric, labels, value)
        return None

    def state(self, metric: str, value: float, **labels: str) -> None:
        """Puts a series of the exporter's own on the page."""
        ordered = self._ordered(metric, labels)
        self._series[metric, ordered] = Series(metric, ordered, value)

    def _ordered(self, metric: str, labels: Mapping[str, str]) -> Labels:
        every = {**dict(self.host_labels), **labels}
        return tuple((name, every[name]) for name in labels_of(ALL[metric]) if every.get(name))
