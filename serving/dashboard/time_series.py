"""The last points of all series at a fixed step, in bounded memory.

Owns what is kept and what is forgotten. Does not own what the series mean (`history`). Pure: no
clock; time is a slot, a whole number of steps since the epoch.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

from serving.dashboard.metric_sampling import Key


class TimeSeries:
    """The values of the last `num_points` slots, for at most `max_series` series in each slot."""

    def __init__(self, step_s: int, num_points: int, max_series: int) -> None:
        self.step_s = step_s
        self.num_points = num_points
        self.max_series = max_series
        self.until = 0  # the slot after the last one; 0 before the first
        self.num_left_out = 0  # series of the last slot beyond `max_series`
        self._slots: deque[tuple[int, Mapping[Key, float]]] = deque(maxlen=num_points)

    def put(self, slot: int, values: Mapping[Key, float]) -> None:
        """Writes the values of a slot. Slots in between have none.

        Raises:
            ValueError: the slot is not later than the last one.
        """
        if slot < self.until:
            raise ValueError(f"slot {slot}: allowed is {self.until} or later")
        self.until = slot + 1
        self.num_left_out = max(0, len(values) - self.max_series)
        self._slots.append((slot, dict(islice(values.items(), self.max_series))))
        while self._slots[0][0] < self.until - self.num_points:
            self._slots.popleft()

    def values_since(self, slot: int) -> list[Mapping[Key, float]]:
        """Returns the values of this slot and of later ones, the oldest first."""
        return [values for at, values in self._slots if at >= slot]

    def first(self, since: int | None) -> int:
        """Returns the slot that `read` begins with for a reader who has all before `since`."""
        oldest = max(0, self.until - self.num_points)
        return oldest if since is None else min(max(since, oldest), self.until)

    def read(self, model: str, since: int | None = None) -> Iterator[tuple[Key, list[float]]]:
        """Yields the series of a model from `first(since)` to `until`, NaN in empty slots."""
        first = self.first(since)
        series: dict[Key, list[float]] = {}
        for slot, values in self._slots:
            if slot < first:
                continue
            for key, value in values.items():
                if key.model == model:
                    points = series.get(key)
                    if points is None:
                        points = series[key] = [math.nan] * (self.until - first)
                    points[slot - first] = value
        yield from series.items()
