"""Remembers the demand of the last minutes: its highest, which is held, and what work there was.

Growth is at once and decline waits: what was needed some minutes ago may be needed again. Time in
which no load was known is skipped: what was needed before it is as old after it. Time comes in.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from autoscaling.policy.demand import Demand


class _Peak:
    """The largest value of the last `span_s`, from a queue of falling ones."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque()

    def look(self, now_s: float, value: float) -> float:
        values = self._values
        while values and values[-1][1] <= value:
            values.pop()
        values.append((now_s, value))
        while values[0][0] < now_s - self._span_s:
            values.popleft()
        return values[0][1]

    def skip(self, unseen_s: float) -> None:
        self._values = _later(self._values, unseen_s)


class Highest(NamedTuple):
    """The highest of the last minutes, in slices: of all, of what is steady, and of what is not.

    What is not is for work that waits or is late. The two need not have been at one time.
    """

    whole: float
    steady: float
    more: float


class HeldDemand:
    """The highest demand of the last `span_s`."""

    def __init__(self, span_s: float) -> None:
        self._peaks = [_Peak(span_s) for _ in Highest._fields]

    def look(self, now_s: float, demand: Demand) -> Highest:
        """Takes in the demand of now; returns the highest."""
        steady = demand.mean + demand.spread
        parts = demand.slices, steady, demand.slices - steady
        pairs = zip(self._peaks, parts, strict=True)
        return Highest(*(peak.look(now_s, part) for peak, part in pairs))

    def skip(self, unseen_s: float) -> None:
        """Lets so long a time count for nothing."""
        for each in self._peaks:
            each.skip(unseen_s)


class RecentWork:
    """What the work of now takes, in slices: its mean over `span_s`, or more if it grew."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque()
        self.slices = 0.0

    def look(self, now_s: float, slices: float) -> None:
        """Takes in what it takes by what was measured last."""
        self._values.append((now_s, slices))
        while self._values[0][0] < now_s - self._span_s:
            self._values.popleft()
        mean = sum(each for _, each in self._values) / len(self._values)
        self.slices = max(mean, slices)

    def skip(self, unseen_s: float) -> None:
        """Lets so long a time count for nothing."""
        self._values = _later(self._values, unseen_s)


def _later(values: Iterable[tuple[float, float]], by_s: float) -> deque[tuple[float, float]]:
    return deque((at_s + by_s, value) for at_s, value in values)
