"""How long a first token takes at least once it is a request's turn, by what others took. Pure.

A request whose client does not wait for so long is refused when it comes (`forecast`), so this errs
on the short side. What a first token takes grows with its cost (`routing`), and a part of it does
not depend on the cost: what a cheaper one took is the least for one that costs more, and of what a
dearer one took the share that one has of its cost.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from statistics import median_low

# So many of each size are kept (twice as large is another size), and believed for so long: whoever
# is refused by them brings no newer ones.
_KEPT = 16
_KEPT_S = 60.0
# So many of the nearest sizes are looked at. One alone may have stood behind something else.
_LOOKED_AT = 8
_LOOK_EVERY = 16


@dataclass(frozen=True, slots=True)
class FirstTokenCosts:
    """What a request takes until its first token, in tokens of prompts (`routing`).

    `soonest` on the engine where it takes least now, with the line there, and `alone` on one that
    has nothing else to do.
    """

    soonest: int
    alone: int


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """The least time for the same, in seconds; 0 while nobody can tell.

    `alone_s` is by the quickest that was seen: engines that are busy take longer than their costs
    say.
    """

    soonest_s: float = 0.0
    alone_s: float = 0.0


class RecentFirstTokens:
    """The first tokens that engines of one version lately made for one gateway."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[int, float, float]]] = {}  # by size: cost, s, at s
        self._num_unlooked = 0
        self.longest_s = 0.0  # no shorter than that of any cost

    def took(self, cost: int, took_s: float, now_s: float) -> None:
        """Takes in that a first token of this cost has taken so long."""
        cost = max(1, cost)
        size = cost.bit_length()
        if size not in self._recent:
            self._recent[size] = deque(maxlen=_KEPT)
        self._recent[size].append((cost, took_s, now_s))
        self.longest_s = max(self.longest_s, took_s)
        self._num_unlooked += 1
        if self._num_unlooked >= _LOOK_EVERY:
            self._num_unlooked = 0
            self.longest_s = max((each[1] for each in self._believed(now_s)), default=0.0)

    def times(self, costs: FirstTokenCosts, now_s: float) -> FirstTokenTimes:
        """Returns the least times for these costs."""
        alone_s = min(self._estimates_s(costs.alone, now_s), default=0.0)
        return FirstTokenTimes(max(alone_s, self.least_s(costs.soonest, now_s)), alone_s)

    def least_s(self, cost: int, now_s: float) -> float:
        """Returns what a first token takes at least; 0 while too few have come lately."""
        estimates_s = self._estimates_s(cost, now_s)
        return median_low(estimates_s) if estimates_s else 0.0

    def _estimates_s(self, cost: int, now_s: float) -> list[float]:
        """Returns what each of the nearest says, of equal ones the latest; empty if too few."""
        wanted = math.log(max(1, cost))
        nearest = heapq.nsmallest(
            _LOOKED_AT,
            self._believed(now_s),
            key=lambda each: (abs(math.log(each[0]) - wanted), now_s - each[2]),
        )
        if len(nearest) < _LOOKED_AT:
            return []
        return [took_s * min(1.0, cost / each) for each, took_s, _ in nearest]

    def _believed(self, now_s: float) -> list[tuple[int, float, float]]:
        return [
            each
            for recent in self._recent.values()
            for each in recent
            if now_s - each[2] <= _KEPT_S
        ]
