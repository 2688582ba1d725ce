"""Computes how values are spread: exact percentiles of values, and those of a histogram. Pure.

A percentile is the smallest value that at least that share of the samples do not exceed: a value
that occurred, the same rule as `histogram.quantile`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.histogram import quantile, seconds_of

SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of `n` values, in their unit; everything is `None` without any."""

    n: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


def spread_of(values: Iterable[float | None]) -> Spread:
    """Returns the spread of the values that exist."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Spread()
    points = {name: ordered[rank_of(share, len(ordered))] for name, share in SHARES.items()}
    return Spread(len(ordered), math.fsum(ordered) / len(ordered), **points, max=ordered[-1])


def spread_of_histogram(counts: Mapping[int, int], longest_s: float | None) -> Spread:
    """Returns the spread of durations in buckets, to 0.5 %; `longest_s` is exact."""
    n = sum(counts.values())
    if not n:
        return Spread()
    mean_s = math.fsum(seconds_of(bucket) * count for bucket, count in counts.items()) / n
    points = {name: quantile(counts, share) for name, share in SHARES.items()}
    return Spread(n, mean_s, **points, max=longest_s)


def rank_of(share: float, n: int) -> int:
    """Returns the place of the percentile, from 0, among `n` values in order."""
    # The product's own rounding must not push a whole number up: 0.95 x 20 is 19.
    return max(0, math.ceil(share * n - 1e-9) - 1)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Returns a percentile of values in rising order; `None` without any."""
    return ordered[rank_of(share, len(ordered))] if ordered else None
