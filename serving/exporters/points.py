"""Decoded values on their way to the page, whatever source they came from.

Owns the records between decoding and labelling, and the arithmetic of histograms. Pure.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# A share of time or of a peak that is a little above 1 is a matter of rounding; more is a fault.
MAX_RATIO = 1.05


class BadValueError(ValueError):
    """A number that cannot be meant. Drop the sample and count it."""


class BadDistributionError(ValueError):
    """A histogram that contradicts itself. Drop it and count it."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by finite upper bound, rising; `count` and `total` are of all values."""

    buckets: tuple[tuple[float, int], ...]
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric of ours.

    `device` is what the source calls the device that it is of, `None` for one of the whole host.
    `labels` are the metric's own, without those of chip, host and workload.
    """

    metric: str
    value: float | Histogram
    device: int | None = None
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Decoded:
    """What came of an answer, and how often what went wrong. Grows while decoding, then rests.

    Devices of `ordinals` are numbered either within the slice or within the host, which the whole
    set of them tells; those of `points` within the slice; those of `host_points` within the host.
    """

    points: list[Point] = field(default_factory=list)
    ordinals: list[Point] = field(default_factory=list)
    host_points: list[Point] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)


def checked_number(value: float, *, is_ratio: bool) -> float:
    """The value itself.

    Raises:
        BadValueError: not a finite number, negative, or a ratio beyond its rounding.
    """
    if not math.isfinite(value) or value < 0 or (is_ratio and value > MAX_RATIO):
        raise BadValueError(f"{value}")
    return value


def histogram(
    bounds: Sequence[float], counts: Sequence[int], count: int, mean: float, divisor: float
) -> Histogram:
    """A histogram in our unit from one in theirs; a value of theirs divided by `divisor` is ours.

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
    if any(each < 0 for each in counts) or sum(counts) != count:
        raise BadDistributionError("counts do not add up")
    padded = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
    cumulative = []
    so_far = 0
    for bound, each in zip(bounds, padded, strict=False):
        so_far += each
        cumulative.append((bound / divisor, so_far))
    return Histogram(tuple(cumulative), count, mean * count / divisor)


def thinned(full: Histogram, max_buckets: int) -> Histogram:
    """The histogram with at most that many finite bounds, the last among them.

    Which ones stay depends on how many there are and on nothing else, so that a series neither
    comes nor goes with the traffic. What stays is exact.
    """
    num_buckets = len(full.buckets)
    if num_buckets <= max_buckets:
        return full
    step = math.ceil(num_buckets / max_buckets)
    kept = full.buckets[(num_buckets - 1) % step :: step]
    return Histogram(kept, full.count, full.total)
