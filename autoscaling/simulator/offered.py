"""Converts a trace's work into slices, interval by interval, by what a slice carries.

Owns the one conversion that the static baseline, the plan with hindsight and the scaling of
scenarios share: it reads a whole trace at once, which no policy may. Pure.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.domain.capacity.slice_profile import CapacityProfile


@dataclass(frozen=True, slots=True)
class Offered:
    """The work that arrives per interval, in slices and fractions of them.

    Interval `k` begins at `k * interval_s`. A slice carries 1 when its steps are exactly as long
    as the objective allows.
    """

    interval_s: float
    slices: NDArray[np.float64]

    @property
    def peak_slices(self) -> int:
        """The whole slices that carry the busiest interval."""
        return math.ceil(float(self.slices.max(initial=0.0)) - 1e-9)

    @property
    def mean_slices(self) -> float:
        """The mean over all intervals."""
        return float(self.slices.mean()) if len(self.slices) else 0.0


def slices_per_request_per_s(
    profile: CapacityProfile, input_tokens: float, output_tokens: float, tpot_s: float
) -> float:
    """Returns the slices that one such request per second takes.

    Raises:
        ValueError: even an idle engine's step is longer than `tpot_s`.
    """
    rate = profile.max_requests_per_s(input_tokens, output_tokens, tpot_s)
    if rate <= 0:
        raise ValueError(
            f"tpot_s is {tpot_s:g}; allowed: more than base_s of the profile, {profile.base_s:g}"
        )
    return 1 / rate


def offered_slices(
    arrival_s: NDArray[np.float64],
    input_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    profile: CapacityProfile,
    *,
    tpot_s: float,
    duration_s: float,
    interval_s: float = 60.0,
) -> Offered:
    """The work of each interval at the interval's own mix of lengths; 0 where nothing arrives.

    Raises:
        ValueError: see `slices_per_request_per_s`.
    """
    num_intervals = max(1, math.ceil(duration_s / interval_s))
    which = np.minimum((arrival_s / interval_s).astype(np.int64), num_intervals - 1)
    count = np.bincount(which, minlength=num_intervals)
    inputs = np.bincount(which, weights=input_tokens, minlength=num_intervals)
    outputs = np.bincount(which, weights=output_tokens, minlength=num_intervals)
    slices = np.zeros(num_intervals)
    for each in np.flatnonzero(count):
        requests = count[each]
        needed = slices_per_request_per_s(
            profile, inputs[each] / requests, outputs[each] / requests, tpot_s
        )
        slices[each] = requests / interval_s * needed
    return Offered(interval_s, slices)
