"""What a need is raised by while objectives are missed or caches are full, whatever the law says.

Late first tokens, slow ones and full KV caches are evidence that slices have too much to do, which
rates and a law may not show: longer prompts than the mean, a burst between two looks, caches that
run out before sequences do. It works one way: it holds the need where it is, and in time adds a
little. It never lowers anything. It counts only while another slice would help: where slices have
more than one request each and a fair part of the work that they are planned for. Pure: time comes
in.
"""

from dataclasses import dataclass

from autoscaling.records import ModelLoad
from serving.domain.load_report import are_too_many

# A cache is full from here on: engines then hold sequences back, or put some off. The median
# engine's counts, so that one with a long prompt shows nothing.
_FULL_KV_RATIO = 0.9
# With less of the planned work on each slice, too few slices are not what is wrong.
_LEAST_USE = 0.5
# A burst that is over by then needs no other slice.
_LASTS_S = 60.0
# Of the mean demand, the most that it adds; one slice at least.
_MOST_ADDED = 0.1


def pressure_reason(load: ModelLoad, mean_slices: float, num_ready: float) -> str | None:
    """Returns what shows that slices have too much to do; `None` if nothing does.

    `mean_slices` is what the load takes by the law, of the `num_ready` that there are.
    """
    is_shared = load.num_in_flight > num_ready > 0
    if not is_shared or mean_slices < _LEAST_USE * num_ready:
        return None
    for what, num_met, num_missed in (
        ("first tokens were late", load.num_ttft_met, load.num_ttft_missed),
        ("answers were slow", load.num_tpot_met, load.num_tpot_missed),
    ):
        if are_too_many(num_missed, num_met):
            return f"{num_missed} of {num_met + num_missed} {what}"
    ratios = sorted(each.kv_usage_ratio for each in load.engines)
    # The lower of the two in the middle.
    median = ratios[(len(ratios) - 1) // 2] if ratios else 0.0
    if median >= _FULL_KV_RATIO:
        return f"{median:.0%} of the KV cache of the median engine is in use"
    return None


@dataclass(slots=True)
class Pressure:
    """Remembers since when there is a reason, whichever."""

    _since_s: float | None = None

    def added_slices(self, now_s: float, mean_slices: float, reason: str | None) -> float:
        """Returns the slices that are added to the mean demand; 0 before it has lasted."""
        if reason is None:
            self._since_s = None
            return 0.0
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _LASTS_S:
            return 0.0
        return max(1.0, _MOST_ADDED * mean_slices)
