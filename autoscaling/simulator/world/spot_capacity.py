"""Models how many slices of a compute class may exist at each instant: series, file, generator.

Owns the shapes of scarcity. Does not own who is preempted when capacity falls (`slices`). Chance
comes in as a seed.

The generator alternates between plenty and scarcity. How long each lasts is drawn from a mixture
of two lognormal laws, because outages come in two kinds: most end within minutes, a few last for
hours. When scarcity begins it takes everything with probability `total_drop_share`, else it leaves
a uniformly drawn share. Lengths in succession are independent.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_DAY_S = 86_400.0


class SpotTraceError(ValueError):
    """Reports an unusable trace. The message names the file, the field and what is allowed."""


@dataclass(frozen=True, slots=True)
class CapacitySeries:
    """The capacity over time: `slices[i]` may exist from `times_s[i]` until the next time.

    The last value holds for ever.

    Raises:
        ValueError: it does not begin at 0, is not in order, or has negative counts.
    """

    times_s: tuple[float, ...]
    slices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.slices) or not self.times_s or self.times_s[0] != 0:
            raise ValueError("times_s must begin at 0 and be as many as slices")
        if np.any(np.diff(self.times_s) <= 0) or min(self.slices) < 0:
            raise ValueError("times_s must rise and slices must not be negative")

    @classmethod
    def constant(cls, slices: int) -> "CapacitySeries":
        """Returns a series of one constant count."""
        return cls((0.0,), (slices,))

    @classmethod
    def of_ticks(cls, counts: npt.ArrayLike, gap_s: float, scale: float = 1.0) -> "CapacitySeries":
        """Builds a series of one count per `gap_s`, times `scale`, rounded down."""
        slices = np.floor(np.asarray(counts) * scale + 1e-9).astype(np.int64)
        firsts = np.flatnonzero(np.diff(slices, prepend=slices[0] - 1))
        return cls(tuple((firsts * gap_s).tolist()), tuple(slices[firsts].tolist()))

    def window(self, start_s: float, duration_s: float) -> "CapacitySeries":
        """Returns the series from `start_s` on, for `duration_s`, with times counted from there."""
        first = int(np.searchsorted(self.times_s, start_s, side="right")) - 1
        last = int(np.searchsorted(self.times_s, start_s + duration_s))
        times_s = (0.0, *(time_s - start_s for time_s in self.times_s[first + 1 : last]))
        return CapacitySeries(times_s, self.slices[first:last])

    def at(self, now_s: float) -> int:
        """Returns how many may exist at `now_s`."""
        return self.slices[int(np.searchsorted(self.times_s, now_s, side="right")) - 1]


class _Metadata(BaseModel):
    # SkyPilot's files carry more than we read.
    model_config = ConfigDict(frozen=True, extra="ignore")

    gap_seconds: Annotated[float, Field(gt=0)]


class _SpotTrace(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    metadata: _Metadata
    data: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class RecordedSpot:
    """The capacity that was recorded, for `length_s` seconds."""

    capacity: CapacitySeries
    length_s: float


def read_spot_trace(path: Path, max_slices: int) -> RecordedSpot:
    """Reads a trace in SkyPilot's format, scaled so that its highest count is `max_slices`.

    Raises:
        SpotTraceError: it cannot be read.
    """
    try:
        trace = _SpotTrace.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise SpotTraceError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "file"
        msg = f"{path}: {field} is {first['input']!r:.60}: {first['msg']}"
        raise SpotTraceError(msg) from error
    scale, gap_s = max_slices / max(1, *trace.data), trace.metadata.gap_seconds
    capacity = CapacitySeries.of_ticks(trace.data, gap_s, scale)
    return RecordedSpot(capacity, len(trace.data) * gap_s)


@dataclass(frozen=True, slots=True)
class RunLengths:
    """The time that a condition lasts: lognormal, one of two kinds.

    `short_share` of the runs are of the first kind. Medians in seconds; spreads are standard
    deviations of the logarithm.
    """

    short_share: float
    short_median_s: float
    short_spread: float
    long_median_s: float
    long_spread: float

    @property
    def mean_s(self) -> float:
        """The expected length."""
        short_s = self.short_median_s * np.exp(self.short_spread**2 / 2)
        long_s = self.long_median_s * np.exp(self.long_spread**2 / 2)
        return float(self.short_share * short_s + (1 - self.short_share) * long_s)

    def draw(self, num: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Draws `num` lengths in seconds."""
        is_short = rng.random(num) < self.short_share
        median_s = np.where(is_short, self.short_median_s, self.long_median_s)
        spread = np.where(is_short, self.short_spread, self.long_spread)
        return np.asarray(median_s * np.exp(spread * rng.standard_normal(num)))


@dataclass(frozen=True, slots=True)
class Regime:
    """The rise and fall of capacity. `total_drop_share` of the drops leave nothing."""

    plenty: RunLengths
    scarcity: RunLengths
    total_drop_share: float


# Fitted on 2026-11-21 to the complete runs of three of the availability traces of
# skypilot-org/spot-traces @ 221da1a (AWS p3.2xlarge, 45 days from 2023-02-15, one node, asked every
# 195 s): calm to us-west-2b, flapping to us-east-2a, dry to us-east-1a. The fit was by expectation
# maximisation; its code is in commit a07807c. They are GPUs of 2023: shapes to test with, never a
# forecast of TPU capacity. One node cannot show how much a drop takes: `total_drop_share` is our
# assumption, mostly everything, as when a zone is out of stock.
REGIMES: Mapping[str, Regime] = {
    "calm": Regime(
        plenty=RunLengths(0.24, 620, 0.15, 10_700, 1.68),
        scarcity=RunLengths(0.59, 1050, 0.45, 5770, 0.83),
        total_drop_share=0.8,
    ),
    "flapping": Regime(
        plenty=RunLengths(0.21, 650, 0.15, 7600, 1.50),
        scarcity=RunLengths(0.56, 945, 0.48, 8170, 1.03),
        total_drop_share=0.8,
    ),
    "dry": Regime(
        plenty=RunLengths(0.34, 620, 0.15, 2390, 0.83),
        scarcity=RunLengths(0.31, 626, 0.15, 5860, 1.45),
        total_drop_share=0.8,
    ),
}


def generate(regime: Regime, max_slices: int, seed: int, span_s: float = _DAY_S) -> CapacitySeries:
    """Generates capacity over `span_s`, from a random point of a run as an observer finds it."""
    rng = np.random.default_rng(seed)
    # Runs before the start make the first one as long as those that an instant falls into.
    warm_up_s = 20 * (regime.plenty.mean_s + regime.scarcity.mean_s)
    times_s: list[float] = []
    slices: list[int] = []
    now_s = -warm_up_s * rng.uniform(0.5, 1.0)
    has_plenty = True
    while now_s < span_s:
        lengths = regime.plenty if has_plenty else regime.scarcity
        is_total = rng.random() < regime.total_drop_share
        left = 0 if is_total else int(rng.integers(0, max(1, max_slices)))
        end_s = now_s + float(lengths.draw(1, rng)[0])
        if end_s > 0:
            times_s.append(max(0.0, now_s))
            slices.append(max_slices if has_plenty else left)
        now_s = end_s
        has_plenty = not has_plenty
    return CapacitySeries(tuple(times_s), tuple(slices))
