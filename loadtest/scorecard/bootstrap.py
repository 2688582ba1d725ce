"""Estimates how far chance may move a figure of a run, from runs drawn out of it. Pure.

Requests, or stretches of time, are drawn again with replacement, as many as there were. Those
near one another in time are not independent, so the spread that comes out is rather too small.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.scorecard.spread import rank_of

NUM_DRAWS = 2000
# Of a percentile with fewer values beyond it, a drawn run shows nothing.
MIN_BEYOND = 5
# So many values are drawn at once: 32 MiB of them.
_MAX_AT_ONCE = 4 * 2**20
# The mean of so many drawn values is normally distributed whatever they are; drawing takes seconds.
_MANY = 20_000

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """The figure made of `n` values; `value` is `None` without any.

    `draw` makes it `NUM_DRAWS` times from drawn values; `None` where there are too few of them.
    """

    value: float | None
    n: int
    draw: Callable[[np.random.Generator], Values] | None


def percentile_figure(values: Iterable[float | None], share: float) -> Figure:
    """Returns a percentile. Its draws are exact, and made without drawing the values.

    The k-th of n draws from uniform chance follows a beta law; where it falls among n equal steps
    is the rank of the value that would have been drawn.
    """
    ordered = np.sort(np.array([value for value in values if value is not None], dtype=float))
    n = len(ordered)
    if not n:
        return Figure(None, 0, None)
    rank = rank_of(share, n)

    def draw(chance: np.random.Generator) -> Values:
        places = chance.beta(rank + 1, n - rank, NUM_DRAWS)
        drawn: Values = ordered[np.minimum((places * n).astype(int), n - 1)]
        return drawn

    has_enough = n * (1 - share) >= MIN_BEYOND
    return Figure(float(ordered[rank]), n, draw if has_enough else None)


def mean_figure(values: Iterable[float | None]) -> Figure:
    """Returns a mean."""
    sample = np.array([value for value in values if value is not None], dtype=float)
    n = len(sample)
    if not n:
        return Figure(None, 0, None)

    def draw(chance: np.random.Generator) -> Values:
        if n > _MANY:
            return chance.normal(sample.mean(), sample.std() / math.sqrt(n), NUM_DRAWS)
        at_once = max(1, _MAX_AT_ONCE // n)
        means = [
            sample[chance.integers(0, n, (min(at_once, NUM_DRAWS - done), n))].mean(axis=1)
            for done in range(0, NUM_DRAWS, at_once)
        ]
        return np.concatenate(means)

    return Figure(float(sample.mean()), n, draw if n >= MIN_BEYOND else None)


def share_figure(num: int, n: int) -> Figure:
    """Returns a share: `num` of `n`."""
    if not n:
        return Figure(None, 0, None)

    def draw(chance: np.random.Generator) -> Values:
        return chance.binomial(n, num / n, NUM_DRAWS) / n

    return Figure(num / n, n, draw if n >= MIN_BEYOND else None)
