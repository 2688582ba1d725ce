"""Counts in logarithmic buckets of 1 %. Histograms of workers add up, percentiles never. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

# Below it everything is one bucket: a tenth of what a client can distinguish.
SMALLEST_S = 1e-5
_PER_E = 100


def bucket_of(seconds: float) -> int:
    """The bucket a duration falls into."""
    return round(math.log(max(seconds, SMALLEST_S)) * _PER_E)


def seconds_of(bucket: int) -> float:
    """The middle of a bucket, within 0.5 % of all that is in it."""
    return math.exp(bucket / _PER_E)


def added(histograms: Iterable[Mapping[int, int]]) -> Counter[int]:
    """Returns the sum of histograms."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return total


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """The smallest duration that at least `share` of the samples do not exceed, in seconds.

    `None` without samples: missing is not zero.
    """
    wanted = share * sum(counts.values())
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return seconds_of(bucket)
    return None
