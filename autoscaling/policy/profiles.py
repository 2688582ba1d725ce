"""The profiles of a model's slices: its own shape, and others that classes may have. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.domain.capacity.slice_profile import CapacityProfile

# What slices carry beside each other changes with the lengths of requests, all the time a little.
_DIGITS = 2


@dataclass(frozen=True, slots=True)
class Profiles:
    """What slices carry: `own` is the profile of those whose class has none in `by_class`.

    Needs are counted in slices of `own`. That is best the smallest shape, for a need is rounded up
    to whole ones.
    """

    own: CapacityProfile
    by_class: Mapping[str, CapacityProfile] = field(default_factory=dict)

    def of(self, compute_class: str) -> CapacityProfile:
        """The profile of a class's slices."""
        return self.by_class.get(compute_class, self.own)

    def weight(self, compute_class: str, tokens: tuple[float, float], step_s: float) -> float:
        """What one slice of a class carries, in slices of `own`, of requests with such `tokens`.

        These are of a prompt, without what caches save, and of its output. Steps are as long as
        `step_s`. It is 0 where even an idle slice takes longer for one.
        """
        if compute_class not in self.by_class:
            return 1.0
        own = self.own.max_requests_per_s(*tokens, step_s)
        carries = self.of(compute_class).max_requests_per_s(*tokens, step_s)
        if not 0 < own < math.inf or not math.isfinite(carries):
            return 1.0
        return round(carries / own, _DIGITS)
