"""What the figures of several pairs come to: the median, where it may lie, and the range. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several values, the smallest and the largest.

    `interval` has the median of all values that there could be with a probability of `CONFIDENCE`
    at least, by order statistics; `None` where there are too few values for any.
    """

    median: float
    low: float
    high: float
    interval: tuple[float, float] | None


def spread_of(values: Sequence[float]) -> Spread | None:
    """Returns the spread of the values; `None` of none."""
    if not values:
        return None
    ordered = sorted(values)
    rank = _rank(len(ordered))
    interval = None if rank is None else (ordered[rank], ordered[-1 - rank])
    return Spread(statistics.median(ordered), ordered[0], ordered[-1], interval)


def _rank(count: int) -> int | None:
    """How many values lie below the interval, and as many above it; `None` for too few values.

    Each value is below the true median with probability 1/2, whatever the distribution is.
    """
    found = None
    outside = 0.0
    for rank in range(count // 2):
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        found = rank
    return found
