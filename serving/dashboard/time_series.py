"""The last minutes of some series, at a fixed step and in bounded memory.

Owns what is kept and what is forgotten. Does not own what the series mean (`history`). Pure: no
clock; time is a slot, a whole number of steps since the epoch.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_BYTES_PER_POINT = 8


class Key(NamedTuple):
    """A series of the history. `model` is empty for all models together."""

    model: str
    name: str
    label: str


@dataclass(slots=True)
class _Column:
    """One series; slot `s` stands at `s % num_points`. `seen` is the last slot with a value."""

    points: "array[float]"
    seen: int


class Ring:
    """Points of at most `max_series` series, each of `num_points` steps. NaN: there was none."""

    def __init__(self, step_s: int, num_points: int, max_series: int) -> None:
        self.step_s = step_s
        self.num_points = num_points
        self.max_series = max_series
        # The slot after the last one; `None` before the first.
        self.until: int | None = None
        # Series of the last slot that there was no room for.
        self.num_left_out = 0
        self._columns: dict[Key, _Column] = {}

    @property
    def num_bytes(self) -> int:
        """What the points take now."""
        return len(self._columns) * self.num_points * _BYTES_PER_POINT

    @property
    def max_bytes(self) -> int:
        """What the points take at most."""
        return self.max_series * self.num_points * _BYTES_PER_POINT

    def put(self, slot: int, values: Mapping[Key, float]) -> None:
        """Writes the values of a slot. Slots in between have none, and so has a series left out.

        A series without a value in the whole ring is forgotten. Where there are too many, the
        first ones of `values` are kept.

        Raises:
            ValueError: the slot is not later than the last one.
        """
        if self.until is not None and slot < self.until:
            raise ValueError(f"slot {slot}: allowed is {self.until} or later")
        self._clear(slot)
        self.until = slot + 1
        self.num_left_out = 0
        for key, value in values.items():
            column = self._columns.get(key)
            if column is None:
                if len(self._columns) >= self.max_series:
                    self.num_left_out += 1
                    continue
                column = self._columns[key] = _Column(
                    array("d", [math.nan]) * self.num_points, slot
                )
            column.points[slot % self.num_points] = value
            column.seen = slot

    def first(self, since: int | None) -> int:
        """The first slot that `read` tells from for a reader who has all before `since`."""
        until = self.until or 0
        oldest = max(0, until - self.num_points)
        return oldest if since is None else min(max(since, oldest), until)

    def read(self, model: str, since: int | None = None) -> Iterator[tuple[Key, Sequence[float]]]:
        """The series of a model, from `first(since)` to `until`, oldest point first."""
        until = self.until or 0
        length = until - self.first(since)
        begin = (until - length) % self.num_points
        for key, column in self._columns.items():
            if key.model == model:
                points = column.points[begin : begin + length]
                points += column.points[: length - len(points)]
                yield key, points.tolist()

    def _clear(self, slot: int) -> None:
        """Empties what the ring keeps of the slots up to this one that were not written."""
        oldest = slot - self.num_points + 1
        begin = oldest if self.until is None else max(self.until, oldest)
        for key in [key for key, column in self._columns.items() if column.seen < oldest]:
            del self._columns[key]
        for column in self._columns.values():
            for each in range(begin, slot + 1):
                column.points[each % self.num_points] = math.nan


@dataclass(slots=True)
class Means:
    """Means over time of the values of several short steps."""

    _sums: dict[Key, tuple[float, float]] = field(default_factory=dict)  # value times s, s

    def add(self, values: Mapping[Key, float], duration_s: float) -> None:
        """Takes the values of a step of this length."""
        for key, value in values.items():
            total, seconds = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = (total + value * duration_s, seconds + duration_s)

    def take(self) -> dict[Key, float]:
        """The means of all since the last time, of the steps in which a series had a value."""
        sums, self._sums = self._sums, {}
        return {key: total / seconds for key, (total, seconds) in sums.items() if seconds > 0}
