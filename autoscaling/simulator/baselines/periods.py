"""When a policy acts that has a period of its own, which looks are no multiple of. Pure."""

import math


def begun_at_s(before_s: float, now_s: float, period_s: float) -> float:
    """Returns when the period began that `now_s` is in, after one that began at `before_s`.

    Periods follow one another without a gap, so that on average a policy acts as often as it would
    by itself, though it is asked every ten seconds and acts every fifteen.
    """
    if before_s == -math.inf:
        return now_s
    return before_s + math.floor((now_s - before_s) / period_s + 1e-9) * period_s
