"""When slices may be given up at all: never while work waits that must not. Pure.

Interactive and standard work has an objective for its first token. While some of it has waited
longer than that, or waits in front of full engines, what demand is computed to be is wrong, or not
answered yet: the need stands, whatever is computed. Batch work has no such objective. While a
gateway is late, what others told is the least that there is, so the need may rise and not fall.
Classes are exchanged all the same, one for one. And the need turns a few times an hour at most: a
slice that is given up now and asked for again in ten minutes is paid for while it loads. Time
comes in.
"""

from collections import deque
from dataclasses import dataclass

from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad

# Less of the last half minute is a burst that engines are through with.
_FULL_RATIO = 0.1
# So often at most the need turns from rising to falling, or back, in an hour.
MOST_TURNS = 6
_HOUR_S = 3600.0


def why_nothing_may_go(load: ModelLoad, rules: Rules) -> str | None:
    """Returns why no slice may be given up under `load`; `None` if they may."""
    if load.late:
        return "; ".join(load.late)
    if load.num_waiting <= 0:
        return None
    # How long the prompt is that waits longest is not known.
    ttft_s = rules.objectives.ttft_of(load.input_tokens_mean)
    if load.oldest_wait_s > ttft_s:
        return (
            f"{load.num_waiting} requests wait, the first for {load.oldest_wait_s:.1f} s;"
            f" the objective is {ttft_s:g} s"
        )
    if load.full_ratio >= _FULL_RATIO:
        return f"{load.num_waiting} requests wait and engines are full"
    return None


class NeedTurns:
    """Bounds how often the need turns: a fall that would turn it once more too often waits.

    Growth waits for nothing. So a fall is allowed only while the rise after it is allowed, too.
    """

    def __init__(self) -> None:
        self._turned_s: deque[float] = deque()
        self._is_rising = False
        self._before: int | None = None

    def bounded(self, now_s: float, need: int) -> int:
        """Returns the need to plan for: `need`, or the one before where that may not fall."""
        before = self._before
        if before is None or need == before:
            self._before = need
            return need
        while self._turned_s and self._turned_s[0] <= now_s - _HOUR_S:
            self._turned_s.popleft()
        if need < before and self._is_rising and len(self._turned_s) + 2 > MOST_TURNS:
            return before
        if (need > before) != self._is_rising:
            self._turned_s.append(now_s)
        self._is_rising, self._before = need > before, need
        return need


@dataclass(slots=True)
class NeedFloor:
    """The need below which none is planned while nothing may go.

    It begins at the slices that are ready, or the need before, and rises with the need.
    """

    reason: str | None = None
    _need: int = 0
    _before: int = 0

    def raised(self, need: int, num_ready: int, reason: str | None) -> int:
        """Returns the need to plan for; `reason` is why nothing may go now, or `None`."""
        if reason is None:
            self._need = 0
        elif self.reason is None:
            self._need = max(self._before, num_ready)
        self.reason = reason
        self._before = self._need = max(need, self._need)
        return self._before
