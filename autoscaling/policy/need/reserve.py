"""How much of its reserve a need keeps: as much as service was seen to take.

What a need has beyond the mean work of now is its reserve: for chance, for the errors of forecasts,
for the highest need of the last minutes. How much of it service takes depends on the traffic: with
one setting conversations keep their objectives in 99.7 of 100 cases, and code in 99.95 at far
greater cost. So some of the reserve is given up while fewer requests miss an objective than may,
over hours, and comes back within minutes when more do. What goes and what comes is in such a
proportion that, over a long time, no more miss than may, if the whole reserve is enough for that.
A miss counts whatever it came of: slices that were lost are what a reserve is for, too.

What was given up was given up because few missed, and is good for as long as somebody looks. Where
requests come and nobody judges any (objectives were taken from gateways), or nothing may miss
(`late_ratio` 0), all of the reserve is kept, whatever was learned before. Without requests nothing
is known and nothing changes.

Pure: time comes in.
"""

from dataclasses import dataclass

from autoscaling.records import ModelLoad

# Without a miss the whole reserve is given up in so long, and with twice as many as may miss it
# comes back as slowly.
_FALLS_IN_S = 3 * 3600.0
# So much of it stays whatever is seen: what was not seen for hours may come.
LEAST_SHARE = 0.1
# Gateways judge a first token within seconds of its request, so in so long some request would have
# been judged if any ever were, at one request in a few minutes as well.
_UNJUDGED_S = 600.0
# All of the reserve then comes back in so long, as it does when one in thirty misses.
_COMES_BACK_S = 600.0
# Looks are some seconds apart. After a silence one look says as much as any other.
_MOST_BETWEEN_S = 60.0


@dataclass(slots=True)
class Reserve:
    """The share of its reserve that a need keeps, from `LEAST_SHARE` to 1; see the module.

    `late_ratio` is the share of requests that may miss an objective; with 0 all of it is kept.
    """

    late_ratio: float
    share: float = 1.0
    _looked_at_s: float | None = None
    # For so long requests have come and none was judged.
    _unjudged_s: float = 0.0

    def __post_init__(self) -> None:
        if self.late_ratio <= 0:
            self.share = 1.0

    def look(self, now_s: float, load: ModelLoad) -> None:
        """Takes in how many requests of the load's window missed an objective."""
        before_s = now_s if self._looked_at_s is None else self._looked_at_s
        elapsed_s = min(now_s - before_s, _MOST_BETWEEN_S)
        self._looked_at_s = now_s
        if self.late_ratio <= 0 or elapsed_s <= 0:
            return
        ratio = _missed_ratio(load)
        if ratio is None:
            change = self._change_unjudged(elapsed_s, load)
        else:
            self._unjudged_s = 0.0
            change = elapsed_s / _FALLS_IN_S * (ratio / self.late_ratio - 1)
        if load.late:  # what is not told may have missed its objective
            change = max(0.0, change)
        self.share = min(max(self.share + change, LEAST_SHARE), 1.0)

    def _change_unjudged(self, elapsed_s: float, load: ModelLoad) -> float:
        """Returns what comes back because requests come, and have for long, and none is judged."""
        if load.requests_per_s <= 0:
            return 0.0
        self._unjudged_s += elapsed_s
        return elapsed_s / _COMES_BACK_S if self._unjudged_s > _UNJUDGED_S else 0.0

    def kept(self, held: float, mean: float) -> float:
        """Returns what is kept of `held` slices, of which `mean` are for the work of now."""
        return held if held <= mean else mean + self.share * (held - mean)

    @property
    def words(self) -> str:
        """How much is kept, for a reader; nothing while it is all of it."""
        return "" if self.share > 0.995 else f"{self.share:.0%} of the reserve is kept"


def _missed_ratio(load: ModelLoad) -> float | None:
    """Returns the share of requests that missed an objective; `None` where none was judged.

    One that missed both counts as two, of those that were judged by either.
    """
    judged = max(load.num_ttft_met + load.num_ttft_missed, load.num_tpot_met + load.num_tpot_missed)
    if judged == 0:
        return None
    return min(1.0, (load.num_ttft_missed + load.num_tpot_missed) / judged)
