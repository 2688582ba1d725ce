"""Draws the instants of requests that wait for nothing: under a changing rate, and of a trace.

Every law is one renewal process of rate 1 (evenly, Poisson, or gamma gaps of a given coefficient
of variation), played on a clock that runs as fast as the rate: exact for any rate, without a grid.
Pure: chance comes in. The instants depend on nothing but the arguments, and those of a longer run
begin with those of a shorter one.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

Instants = npt.NDArray[np.float64]

_DRAWN_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class RatePiece:
    """The stretch over which the rate, in requests per second, goes from one value to another."""

    start_s: float
    end_s: float
    start_per_s: float
    end_per_s: float

    @property
    def expected(self) -> float:
        """The requests that the piece stands for."""
        return (self.start_per_s + self.end_per_s) / 2 * (self.end_s - self.start_s)


def steady(rate_per_s: float, duration_s: float) -> tuple[RatePiece, ...]:
    """Returns one rate throughout."""
    return (RatePiece(0.0, duration_s, rate_per_s, rate_per_s),)


def ramp(points: Sequence[tuple[float, float]], duration_s: float) -> tuple[RatePiece, ...]:
    """Returns straight pieces between rising points (second, rate); beyond them the ends hold."""
    times_s = [0.0, *(at_s for at_s, _ in points if 0 < at_s < duration_s), duration_s]
    rates = np.interp(times_s, [at_s for at_s, _ in points], [rate for _, rate in points])
    return tuple(
        RatePiece(start_s, end_s, float(start), float(end))
        for start_s, end_s, start, end in zip(times_s, times_s[1:], rates, rates[1:], strict=False)
    )


def steps(points: Sequence[tuple[float, float]], duration_s: float) -> tuple[RatePiece, ...]:
    """Returns each rate from its second on, ascending from 0; the last one holds."""
    ends_s = [at_s for at_s, _ in points[1:]] + [math.inf]
    return tuple(
        RatePiece(at_s, min(end_s, duration_s), rate, rate)
        for (at_s, rate), end_s in zip(points, ends_s, strict=True)
        if at_s < duration_s
    )


def instants(pieces: Sequence[RatePiece], cv: float, rng: np.random.Generator) -> Instants:
    """Returns arrivals in ascending order, in seconds: f64[arrival].

    `cv` is the coefficient of variation of the gaps at a steady rate: 0 evenly, 1 Poisson, above 1
    in bursts.
    """
    ends = np.cumsum([piece.expected for piece in pieces])
    points = _unit_points(float(ends[-1]), cv, rng)
    begins = ends - [piece.expected for piece in pieces]
    index = np.searchsorted(ends, points, side="right")
    # A point may lie on the very end by rounding.
    index = np.minimum(index, len(pieces) - 1)
    columns = np.array([astuple(piece) for piece in pieces]).T
    start_s, end_s, start_per_s, end_per_s = columns[:, index]
    slope = (end_per_s - start_per_s) / (end_s - start_s)
    area = points - begins[index]
    # The time t at which start * t + slope * t^2 / 2 is the area, in the form that loses no digits.
    root = np.sqrt(np.maximum(start_per_s**2 + 2 * slope * area, 0.0))
    divisor = start_per_s + root
    passed_s = np.divide(2 * area, divisor, out=np.zeros_like(area), where=divisor > 0)
    found = start_s + np.minimum(passed_s, end_s - start_s)
    # Points next to each other may change places by rounding.
    return np.asarray(np.maximum.accumulate(found), dtype=np.float64)


def _unit_points(total: float, cv: float, rng: np.random.Generator) -> Instants:
    """Draws points of a renewal process of rate 1 in [0, total).

    It is stationary: as many are expected in any stretch, the first one included, however bursty.
    """
    if cv == 0:
        # As many as a rate of 0.1 over 30 s makes, which is 3.0000000000000004.
        return np.arange(math.ceil(total - 1e-9), dtype=np.float64)
    shape = cv**-2
    # The gap that the beginning falls into is found in proportion to its length.
    last = float(rng.random()) * float(rng.gamma(shape + 1, 1 / shape))
    found = [np.array([last])]
    while last < total:
        found.append(last + np.cumsum(rng.gamma(shape, 1 / shape, _DRAWN_AT_ONCE)))
        last = float(found[-1][-1])
    points = np.concatenate(found)
    return np.asarray(points[points < total], dtype=np.float64)


def thin(count: int, keep_ratio: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Keeps each of `count` rows with the chance `keep_ratio`; returns a mask: bool[row]."""
    return np.asarray(rng.random(count) < keep_ratio, dtype=np.bool_)
