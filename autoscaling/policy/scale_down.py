"""When slices may be given up at all: never while work waits that must not. Pure.

Interactive and standard work has an objective for its first token. While some of it has waited
longer than that, or waits in front of full engines, what demand is computed to be is wrong, or not
answered yet: the need stands, whatever is computed. Batch work has no such objective. While a
gateway is late, what others told is the least that there is, so the need may rise and not fall.
Classes are exchanged all the same, one for one. Time comes in.
"""

from dataclasses import dataclass

from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad

# Less of the last half minute is a burst that engines are through with.
_FULL_RATIO = 0.1


def why_nothing_may_go(load: ModelLoad, rules: Rules) -> str | None:
    """Returns why no slice may be given up under `load`; `None` if they may."""
    if load.late:
        return "; ".join(load.late)
    if load.num_waiting <= 0:
        return None
    ttft_s = rules.objectives.ttft_s
    if load.oldest_wait_s > ttft_s:
        return (
            f"{load.num_waiting} requests wait, the first for {load.oldest_wait_s:.1f} s;"
            f" the objective is {ttft_s:g} s"
        )
    if load.full_ratio >= _FULL_RATIO:
        return f"{load.num_waiting} requests wait and engines are full"
    return None


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
