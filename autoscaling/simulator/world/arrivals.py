"""Generates requests to the platform: instants and lengths, as arrays.

Owns how a day is built from an hour of trace, and rates over time. Does not own trace files; rows
come in as arrays. Pure: chance comes in as a seed.

A day is built by a block bootstrap. The trace is cut into blocks of `block_s`; blocks are drawn and
laid one after the other, which keeps each request's two lengths together and the bursts within a
block as they were. That sequence is then stretched and squeezed in time until its rate follows the
profile. The gaps keep their coefficient of variation. At ten times the trace's rate a burst lasts a
tenth of its time; over windows longer than a block the counts vary as those of ten independent
copies of the trace would.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests in order of arrival, lengths in tokens, each at least 1.

    Raises:
        ValueError: lengths differ, arrivals are not in order or negative, or a length is below 1.
    """

    arrival_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        sizes = {len(self.arrival_s), len(self.input_tokens), len(self.output_tokens)}
        if len(sizes) != 1:
            raise ValueError(f"arrays of one length are needed, these have {sorted(sizes)}")
        if len(self) and (self.arrival_s[0] < 0 or np.any(np.diff(self.arrival_s) < 0)):
            raise ValueError("arrival_s must be in order and not negative")
        if len(self) and min(self.input_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError("input_tokens and output_tokens must be at least 1")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[float, int, int]]) -> "Requests":
        """Builds requests from (arrival in seconds, input tokens, output tokens), in any order.

        A request without a token in or out counts as one with one.
        """
        ordered = sorted(rows, key=lambda row: row[0])
        return cls(
            np.array([row[0] for row in ordered], np.float64),
            np.array([max(1, row[1]) for row in ordered], np.int32),
            np.array([max(1, row[2]) for row in ordered], np.int32),
        )

    def until(self, end_s: float) -> "Requests":
        """Returns those that arrive before `end_s`."""
        num = int(np.searchsorted(self.arrival_s, end_s))
        return Requests(self.arrival_s[:num], self.input_tokens[:num], self.output_tokens[:num])


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
    """A batch that comes at `submitted_s` and may take `window_s`.

    `lines` has their lengths; its arrivals say nothing.
    """

    submitted_s: float
    window_s: float
    lines: Requests

    @property
    def expires_at_s(self) -> float:
        """What is not answered by then is not."""
        return self.submitted_s + self.window_s


@dataclass(frozen=True, slots=True)
class RateProfile:
    """The requests per second over time: straight lines between points, nothing outside of them.

    Two points at one instant are a step.
    """

    times_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        times_s, rates_per_s = np.array(self.times_s), np.array(self.rates_per_s)
        if len(times_s) != len(rates_per_s) or len(times_s) < 2:
            raise ValueError(f"times_s has {len(times_s)} points, rates_per_s {len(rates_per_s)}")
        if np.any(np.diff(times_s) < 0) or times_s[0] < 0 or np.any(rates_per_s < 0):
            raise ValueError("times_s must be in order and not negative, rates_per_s not negative")
        if self.num_expected <= 0:
            raise ValueError("rates_per_s is zero everywhere")

    @property
    def cumulated(self) -> npt.NDArray[np.float64]:
        """The requests expected up to each point."""
        rates_per_s = np.array(self.rates_per_s)
        areas = np.diff(self.times_s) * (rates_per_s[1:] + rates_per_s[:-1]) / 2
        return np.concatenate([[0.0], np.cumsum(areas)])

    @property
    def num_expected(self) -> float:
        """The number of requests expected in all."""
        return float(self.cumulated[-1])

    def at_share(self, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The instants by which these shares (0 to 1) of all requests are expected."""
        times_s, rates_per_s = np.array(self.times_s), np.array(self.rates_per_s)
        cumulated = self.cumulated
        wanted = share * cumulated[-1]
        last = len(times_s) - 2
        leg = np.clip(np.searchsorted(cumulated, wanted, side="right") - 1, 0, last)
        span_s = np.diff(times_s)[leg]
        start = rates_per_s[leg]
        # Within a leg the rate is start + slope * t: the area is a parabola, solved for t in the
        # form that stays exact where slope or start is 0.
        slope = np.diff(rates_per_s)[leg] / np.where(span_s > 0, span_s, 1.0)
        area = wanted - cumulated[leg]
        root = np.sqrt(np.maximum(start * start + 2 * slope * area, 0.0))
        below = start + root
        within_s = np.divide(2 * area, below, out=np.zeros_like(area), where=below > 0)
        return np.asarray(times_s[leg] + np.minimum(within_s, span_s))


# A weekday of an interactive service, as shares of the mean by hour: a trough before dawn, humps
# before and after lunch. Shape ours; peak over mean 1.66, over trough 6.4.
_WEEKDAY = (
    *(0.42, 0.34, 0.29, 0.26, 0.27, 0.34, 0.52, 0.86, 1.27, 1.55, 1.66, 1.60),
    *(1.38, 1.44, 1.62, 1.65, 1.57, 1.42, 1.23, 1.10, 1.00, 0.87, 0.71, 0.55),
)


def weekday(mean_rate: float, days: int = 1) -> RateProfile:
    """Returns rates per second over a weekday from midnight, with `mean_rate` as their mean."""
    shape = np.array(_WEEKDAY * days + _WEEKDAY[:1])
    area = (shape[1:] + shape[:-1]).mean() / 2
    hours = np.arange(len(shape)) * 3600.0
    return RateProfile(tuple(hours.tolist()), tuple((shape * mean_rate / area).tolist()))


def stages(*legs: tuple[float, float]) -> RateProfile:
    """Returns constant rates one after the other, each given as (seconds, requests per second)."""
    times_s: list[float] = []
    rates_per_s: list[float] = []
    now_s = 0.0
    for duration_s, rate_per_s in legs:
        times_s += [now_s, now_s + duration_s]
        rates_per_s += [rate_per_s, rate_per_s]
        now_s += duration_s
    return RateProfile(tuple(times_s), tuple(rates_per_s))


def build_day(
    trace: Requests,
    *,
    mean_rate: float,
    seed: int,
    profile: RateProfile | None = None,
    block_s: float = 30.0,
) -> Requests:
    """Builds a day like the trace at `mean_rate` requests per second; see the module.

    `profile` is the shape over time, scaled to that mean; a weekday without one.
    """
    shape = profile if profile is not None else weekday(1.0)
    span_s = shape.times_s[-1] - shape.times_s[0]
    num = round(mean_rate * span_s)
    picked, offsets_s = _bootstrap(trace, num, block_s, np.random.default_rng(seed))
    share = (offsets_s - offsets_s[0]) / max(float(offsets_s[-1] - offsets_s[0]), 1e-9)
    return Requests(
        shape.at_share(share * (1 - 1e-12)), trace.input_tokens[picked], trace.output_tokens[picked]
    )


def draw_poisson(profile: RateProfile, lengths: Requests, seed: int) -> Requests:
    """Draws independent arrivals at the rates of `profile`; lengths in pairs from `lengths`."""
    rng = np.random.default_rng(seed)
    num = int(rng.poisson(profile.num_expected))
    picked = rng.integers(len(lengths), size=num)
    arrival_s = profile.at_share(np.sort(rng.random(num)))
    return Requests(arrival_s, lengths.input_tokens[picked], lengths.output_tokens[picked])


def constant_lengths(input_tokens: int, output_tokens: int) -> Requests:
    """Returns one pair of lengths, for `draw_poisson`."""
    return Requests(
        np.zeros(1), np.array([input_tokens], np.int32), np.array([output_tokens], np.int32)
    )


def _bootstrap(
    trace: Requests, num: int, block_s: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Draws `num` rows of the trace in blocks, each with its time on a clock of blocks in a row."""
    if num < 1:
        raise ValueError(f"{num} requests is too few; allowed: at least 1")
    offset_s = trace.arrival_s - trace.arrival_s[0]
    # The trace's end cuts a block short: only whole blocks are drawn, unless there is just one.
    num_blocks = max(1, int(offset_s[-1] // block_s))
    firsts = np.searchsorted(offset_s, np.arange(num_blocks + 1) * block_s)
    sizes = np.diff(firsts)
    # A fifth more than expected to be needed; drawn again in the rare case that it is not enough.
    wanted = int(1.2 * num / max(float(sizes.mean()), 1e-9)) + 50
    drawn = rng.integers(num_blocks, size=wanted)
    while sizes[drawn].sum() < num:
        drawn = np.concatenate([drawn, rng.integers(num_blocks, size=wanted)])
    counts = sizes[drawn]
    starts = np.cumsum(counts) - counts
    place = np.repeat(np.arange(len(drawn)), counts)[:num]
    picked = firsts[drawn][place] + np.arange(num) - starts[place]
    return picked, place * block_s + offset_s[picked] - drawn[place] * block_s
