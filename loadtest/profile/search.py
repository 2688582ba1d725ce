"""The highest rate of requests that still meets an objective: which rate to try next. Pure.

Doubling until a rate fails (or halving until one passes), then bisection in the logarithm. A trial
passes unless the share of requests within the limits is shown to be too low: the upper end of its
95 % interval is at least `share`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of a two-sided 95 % interval.
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial of one rate: `num_good` of `num_requests` were within the limits.

    `is_valid` is false when the client was the bottleneck. Such a trial shows nothing of the
    server, and no higher rate can be tried with this client.
    """

    requests_per_s: float
    num_good: int
    num_requests: int
    is_valid: bool = True

    @property
    def share(self) -> float:
        """Returns those within the limits, of all; 0 of none."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    def passes(self, share: float) -> bool:
        """Returns whether it met the objective. Misses that chance explains are forgiven."""
        return self.is_valid and wilson(self.num_good, self.num_requests)[1] >= share


@dataclass(frozen=True, slots=True)
class Search:
    """The bounds of a search.

    `first_per_s` is where to begin. The search ends when the highest rate that passed and the
    lowest that failed are within `tolerance` (0.1: ten per cent), or after `max_trials`.
    """

    first_per_s: float
    share: float = 0.99
    tolerance: float = 0.1
    max_trials: int = 12

    def __post_init__(self) -> None:
        if self.first_per_s <= 0:
            raise ValueError(f"first_per_s is {self.first_per_s!r}; allowed: above 0")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}; allowed: above 0, up to 1")
        if self.tolerance <= 0:
            raise ValueError(f"tolerance is {self.tolerance!r}; allowed: above 0")


def next_rate(search: Search, trials: Sequence[Trial]) -> float | None:
    """The rate to try after these trials; `None` when the search is over."""
    if not trials:
        return search.first_per_s
    if len(trials) >= search.max_trials:
        return None
    passed = highest_passed(search, trials)
    failed = [trial.requests_per_s for trial in trials if not trial.passes(search.share)]
    if passed is None:
        return min(failed) / 2
    above = [rate for rate in failed if rate > passed.requests_per_s]
    if not above:
        return 2 * passed.requests_per_s
    if min(above) / passed.requests_per_s <= 1 + search.tolerance:
        return None
    return math.sqrt(min(above) * passed.requests_per_s)


def highest_passed(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """The highest rate below every failure that passed; `None` when none did.

    A rate that passed above one that failed was luck.
    """
    failed = [trial.requests_per_s for trial in trials if not trial.passes(search.share)]
    lowest_failed = min(failed, default=math.inf)
    passed = [
        trial
        for trial in trials
        if trial.passes(search.share) and trial.requests_per_s < lowest_failed
    ]
    return max(passed, key=lambda trial: trial.requests_per_s, default=None)


def wilson(num_good: int, num_requests: int) -> tuple[float, float]:
    """Returns Wilson's interval of 95 % for a share; (0, 0) for no requests: nothing was shown."""
    if num_requests == 0:
        return 0.0, 0.0
    share = num_good / num_requests
    z2 = _Z * _Z / num_requests
    centre = (share + z2 / 2) / (1 + z2)
    reach = _Z * math.sqrt(share * (1 - share) / num_requests + z2 / (4 * num_requests)) / (1 + z2)
    return max(0.0, centre - reach), min(1.0, centre + reach)
