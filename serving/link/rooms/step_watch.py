"""What an engine has done of late, of the sums that it tells. Pure."""

from serving.domain.capacity.step_places import LOOK_S, StepSums
from serving.link.messages import EngineStats


class StepWatch:
    """The sums of an engine at the last look. Times are monotonic."""

    def __init__(self) -> None:
        self._before: EngineStats | None = None
        self._looked_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Returns whether it is time to look again."""
        return self._before is None or now_s - self._looked_s >= LOOK_S

    def look(self, stats: EngineStats, now_s: float) -> StepSums:
        """Takes in the sums as they are now; returns what was done since the last look."""
        before, self._before, self._looked_s = self._before or stats, stats, now_s
        return StepSums(
            stats.generation_tokens - before.generation_tokens,
            (stats.num_steps - before.num_steps) * _tokens_each(before, stats),
            stats.busy_s - before.busy_s,
        )


def _tokens_each(before: EngineStats, now: EngineStats) -> float:
    """Returns what a step gives a sequence on average: a token, and what is accepted of drafts.

    Some sequences have no draft in a step, so how many drafts there were says nothing of all.
    """
    if before.drafts is None or now.drafts is None:
        return 1.0
    num_tokens = now.generation_tokens - before.generation_tokens
    num_others = num_tokens - (now.drafts[2] - before.drafts[2])
    return num_tokens / num_others if 0 < num_others < num_tokens else 1.0
