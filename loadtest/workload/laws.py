"""Defines laws of counts and of waits, as a workload file states them, and draws from them.

Pure: the generator comes in. A draw takes one number from it.
"""

import math
import random
from statistics import NormalDist
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


class Part(BaseModel):
    """The base of every part of a workload file: strict, with finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FixedCount(Part):
    """The constant count."""

    law: Literal["fixed"] = "fixed"
    value: Count

    def draw(self, rng: random.Random) -> int:  # noqa: ARG002, a law among others
        """The value."""
        return self.value


class UniformCount(Part):
    """The law of counts from `min` to `max`, both included, equally often."""

    law: Literal["uniform"] = "uniform"
    min: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}; allowed: at least min, {self.min}")
        return self

    def draw(self, rng: random.Random) -> int:
        """Returns a whole number of the range."""
        return self.min + int(rng.random() * (self.max - self.min + 1))


class LognormalCount(Part):
    """The lognormal law by its median and its 99th percentile, before it is cut off above `max`.

    What lies beyond 1 to `max` is not drawn, rather than moved to the ends.
    """

    law: Literal["lognormal"] = "lognormal"
    p50: Annotated[float, Field(ge=1)]
    p99: Annotated[float, Field(ge=1)]
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p99 <= self.p50:
            raise ValueError(f"p99 is {self.p99:g}; allowed: above p50, {self.p50:g}")
        if self.max < self.p50:
            raise ValueError(f"max is {self.max}; allowed: at least p50, {self.p50:g}")
        return self

    def draw(self, rng: random.Random) -> int:
        """Returns a whole number from 1 to `max`."""
        mean, sigma = math.log(self.p50), math.log(self.p99 / self.p50) / _Z99
        low, high = (
            _NORMAL.cdf((math.log(bound) - mean) / sigma) for bound in (0.5, self.max + 0.5)
        )
        # random() may be 0; the law has no quantile there.
        share = max(low + (high - low) * rng.random(), 1e-300)
        value = round(math.exp(mean + sigma * _NORMAL.inv_cdf(share)))
        # Rounding at the very ends may step over them.
        return min(max(value, 1), self.max)


CountLaw = Annotated[FixedCount | UniformCount | LognormalCount, Field(discriminator="law")]


class FixedWait(Part):
    """The constant wait."""

    law: Literal["fixed"] = "fixed"
    value_s: Seconds

    def draw(self, rng: random.Random) -> float:  # noqa: ARG002, a law among others
        """The value, in seconds."""
        return self.value_s


class ExponentialWait(Part):
    """The exponential law of waits, by its mean."""

    law: Literal["exponential"] = "exponential"
    mean_s: Seconds

    def draw(self, rng: random.Random) -> float:
        """Draws seconds."""
        return -self.mean_s * math.log(1 - rng.random())


class LognormalWait(Part):
    """The lognormal law of waits, by its median and its 99th percentile."""

    law: Literal["lognormal"] = "lognormal"
    p50_s: Annotated[float, Field(gt=0)]
    p99_s: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p99_s <= self.p50_s:
            raise ValueError(f"p99_s is {self.p99_s:g}; allowed: above p50_s, {self.p50_s:g}")
        return self

    def draw(self, rng: random.Random) -> float:
        """Draws seconds."""
        sigma = math.log(self.p99_s / self.p50_s) / _Z99
        return self.p50_s * math.exp(sigma * _NORMAL.inv_cdf(max(rng.random(), 1e-300)))


WaitLaw = Annotated[FixedWait | ExponentialWait | LognormalWait, Field(discriminator="law")]
