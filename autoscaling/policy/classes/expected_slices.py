"""How many slices of a class are expected to serve by when. Pure.

A decision asks this dozens of times of the same slices, of which there may be a thousand.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpectedSlices:
    """Those of one class that do not drain, at one instant, in seconds.

    Of those without a known end `ready_at_s` has when they are expected to serve, in order, and of
    the others `ending` has that and in how long they leave. One that serves is ready since ever.
    """

    now_s: float
    ready_at_s: Sequence[float]
    ending: Sequence[tuple[float, float]]

    def num_within(self, within_s: float) -> int:
        """Returns how many serve in `within_s`."""
        by_s = self.now_s + within_s
        staying = bisect_right(self.ready_at_s, by_s)
        return staying + sum(
            1
            for ready_at_s, leaves_in_s in self.ending
            if ready_at_s <= by_s and leaves_in_s >= within_s
        )
