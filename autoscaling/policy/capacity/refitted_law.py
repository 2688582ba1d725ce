"""A profile's law, fitted again to the steps that engines take below saturation. Pure.

A step takes, by the law, a base time and a time for what is in it. Where engines carry now more and
now less, steps tell both apart: a line through their lengths over the work in them. Where all carry
the same they do not, and then the profile's own law decides between the two.

What is given is a capacity that is true with some certainty: the line that is slowest for full
steps among those that fit about as well. Looks count less with time.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile

# Rates are of half a minute, so looks at one engine within that time are one.
WINDOW_S = 30.0
# In so many seconds a look loses two thirds of its weight. Loads differ between hours.
_MEMORY_S = 4 * 3600.0
# An engine with fewer sequences is idle now and then.
SEQUENCES_FOR_PACE = 4.0
# How far base and work are from the profile's, as one standard deviation, before anything is seen.
_PRIOR = 0.5
# Steps scatter by so much at least, of the law's length, whatever was seen.
_LEAST_SCATTER = 0.02
# Beyond two standard deviations a line fits badly.
_DEVIATIONS = 2.0
_LEAST_TIMES = 1 / 3
# Sums of looks that are all alike may be off by a rounding.
_ROUNDED = 1 - 1e-9
# Beside the median of a look, an engine that is slower or quicker than this is another's business.
_ALIKE = 0.7


@dataclass(frozen=True, slots=True)
class LawFit:
    """Sums over what engines of one class have shown, each look weighted by its time.

    `x` is the work in a step and `y` its length, both in base times of the profile: by the profile
    `y = 1 + x`.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def seen(
        self, elapsed_s: float, rates: Iterable[EngineRate], profile: CapacityProfile
    ) -> "LawFit":
        """The sums with one look more, `elapsed_s` after the one before."""
        elapsed_s = min(max(0.0, elapsed_s), WINDOW_S)
        kept, new = math.exp(-elapsed_s / _MEMORY_S), elapsed_s / WINDOW_S
        points = _alike([at for rate in rates if (at := _point(rate, profile)) is not None])
        return LawFit(
            kept * self.weight + new * len(points),
            kept * self.x + new * sum(x for x, _ in points),
            kept * self.y + new * sum(y for _, y in points),
            kept * self.xx + new * sum(x * x for x, _ in points),
            kept * self.xy + new * sum(x * y for x, y in points),
            kept * self.yy + new * sum(y * y for _, y in points),
        )

    @property
    def is_possible(self) -> bool:
        """True if looks can have such sums: squares are not less than their means allow."""
        return (
            self.weight * self.xx >= _ROUNDED * self.x**2
            and self.weight * self.yy >= _ROUNDED * self.y**2
            and self.xx * self.yy >= _ROUNDED * self.xy**2
        )

    def law(self, profile: CapacityProfile, planned_s: float) -> CapacityProfile:
        """Returns the slowest law, for steps of `planned_s`, that fits what was seen."""
        slope, base = self._slowest(planned_s / profile.base_s)
        return profile.model_copy(
            update={
                "base_s": base * profile.base_s,
                "per_sequence_s": slope * profile.per_sequence_s,
                "per_prompt_token_s": slope * profile.per_prompt_token_s,
            }
        )

    def _slowest(self, planned: float) -> tuple[float, float]:
        """Returns how many times the law's work, and its base, steps take at most."""
        slope, base, scatter = self._line()
        full = max(1.0, (planned - base) / slope)
        ww, wx, xx, determinant = self._with_prior(scatter / _PRIOR**2)
        # Covariances of the line with its value at a full step.
        of_base = scatter * (xx - full * wx) / determinant
        of_slope = scatter * (full * ww - wx) / determinant
        deviation = math.sqrt(max(of_base + full * of_slope, 1e-12))
        base += _DEVIATIONS * of_base / deviation
        slope += _DEVIATIONS * of_slope / deviation
        return max(slope, _LEAST_TIMES), max(base, _LEAST_TIMES)

    def _line(self) -> tuple[float, float, float]:
        """Returns the line's slope, its base and the variance of what was seen about it."""
        scatter = least_scatter = _LEAST_SCATTER**2
        slope = base = 1.0
        for _ in range(2):  # the prior's weight is by the scatter, which is about the line
            prior = scatter / _PRIOR**2
            ww, wx, xx, determinant = self._with_prior(prior)
            wy, xy = self.y + prior, self.xy + prior
            base = (xx * wy - wx * xy) / determinant
            slope = (ww * xy - wx * wy) / determinant
            base, slope = max(base, _LEAST_TIMES), max(slope, _LEAST_TIMES)
            squares = (
                self.yy
                - 2 * (base * self.y + slope * self.xy)
                + base * base * self.weight
                + 2 * base * slope * self.x
                + slope * slope * self.xx
            )
            if self.weight > 0:
                scatter = max(least_scatter, squares / self.weight)
        return slope, base, scatter

    def _with_prior(self, prior: float) -> tuple[float, float, float, float]:
        """Returns the sums of weights, `x` and its squares, and their determinant.

        The prior weighs as `prior` looks each at the base alone and at the work alone.
        """
        ww, wx, xx = self.weight + prior, self.x, self.xx + prior
        return ww, wx, xx, ww * xx - wx * wx


def _alike(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points of engines that are about as quick as most: one of ten teaches nothing."""
    if not points:
        return points
    times = [y / (1 + x) for x, y in points]
    median = statistics.median(times)
    return [
        point
        for point, each in zip(points, times, strict=True)
        if _ALIKE * median <= each <= median / _ALIKE
    ]


def _point(rate: EngineRate, profile: CapacityProfile) -> tuple[float, float] | None:
    """Returns an engine's work in a step and its length; `None` where it may have been idle."""
    if rate.step_s <= 0 or rate.num_running < SEQUENCES_FOR_PACE:
        return None
    work_s = rate.step_s * profile.work_s(rate.prompt_tokens_per_s, rate.output_tokens_per_s)
    return work_s / profile.base_s, rate.step_s / profile.base_s
