"""Defines the arrival laws of a workload file.

Owns the fields of each law, their bounds and the rules between them; what they mean in instants is
in `schedule`. Pure.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from loadtest.workload.laws import Count, FixedWait, Part, Seconds, WaitLaw

Rate = Annotated[float, Field(gt=0)]
# Beyond this gamma gaps are more often 0 than not; Azure's code trace has 13.
_MAX_CV = 30.0
Cv = Annotated[float, Field(ge=0, le=_MAX_CV)]


class ConstantArrivals(Part):
    """The law of even arrivals, the first at once."""

    law: Literal["constant"] = "constant"
    rate_per_s: Rate


class PoissonArrivals(Part):
    """The law of arrivals independent of each other."""

    law: Literal["poisson"] = "poisson"
    rate_per_s: Rate


class GammaArrivals(Part):
    """The law of gamma gaps.

    `cv` is their coefficient of variation: below 1 smoother than Poisson, above 1 in bursts.
    """

    law: Literal["gamma"] = "gamma"
    rate_per_s: Rate
    cv: Annotated[float, Field(gt=0, le=_MAX_CV)]


class RatePoint(Part):
    """The rate at an instant of the run."""

    at_s: Seconds
    rate_per_s: Annotated[float, Field(ge=0)]


def _ascending(points: tuple[RatePoint, ...]) -> None:
    for before, after in pairwise(points):
        if after.at_s <= before.at_s:
            raise ValueError(f"at_s is {after.at_s:g} after {before.at_s:g}; allowed: ascending")
    if not any(point.rate_per_s for point in points):
        raise ValueError("every rate_per_s is 0; allowed: at least one above it")


class RampArrivals(Part):
    """The law of a rate straight from point to point; the end values hold beyond the points."""

    law: Literal["ramp"] = "ramp"
    points: Annotated[tuple[RatePoint, ...], Field(min_length=1)]
    cv: Cv = 1.0

    @model_validator(mode="after")
    def _checked(self) -> Self:
        _ascending(self.points)
        return self


class StepArrivals(Part):
    """The law of a rate that jumps at each point and holds; the first point is at 0."""

    law: Literal["steps"] = "steps"
    points: Annotated[tuple[RatePoint, ...], Field(min_length=1)]
    cv: Cv = 1.0

    @model_validator(mode="after")
    def _checked(self) -> Self:
        _ascending(self.points)
        if self.points[0].at_s != 0:
            raise ValueError(f"the first at_s is {self.points[0].at_s:g}; allowed: 0")
        return self


class ReplayArrivals(Part):
    """The arrivals of a trace, with its lengths and sharing.

    `scale` is how much faster its time runs (2: twice the rate, half the time). `rate_per_s` then
    thins what is played to a mean rate: each request, or session, is kept by the same chance.
    `None` keeps all. Where the trace ends before the run does, nothing more comes, unless it is to
    `repeat`; what it repeats has prompts of its own.
    """

    law: Literal["replay"] = "replay"
    trace: Path
    scale: Rate = 1.0
    rate_per_s: Rate | None = None
    repeat: bool = False


class ServegenArrivals(Part):
    """The law of ServeGen's clients, from a folder or one file.

    `start_s` is where in their days the run begins. Every client's rate is multiplied by `scale`,
    or by what brings their sum to `rate_per_s` on average over the run; bursts stay as they are.
    """

    law: Literal["servegen"] = "servegen"
    trace: Path
    scale: Rate = 1.0
    rate_per_s: Rate | None = None
    start_s: Seconds = 0.0

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.rate_per_s is not None and self.scale != 1:
            raise ValueError(f"scale is {self.scale:g} beside rate_per_s; allowed: one of the two")
        return self


class ClosedArrivals(Part):
    """The law of users who ask, wait for the answer, think and ask again: no arrival rate."""

    law: Literal["closed"] = "closed"
    num_users: Count
    think_time_s: WaitLaw = FixedWait(value_s=0.0)


Arrivals = Annotated[
    ConstantArrivals
    | PoissonArrivals
    | GammaArrivals
    | RampArrivals
    | StepArrivals
    | ReplayArrivals
    | ServegenArrivals
    | ClosedArrivals,
    Field(discriminator="law"),
]
