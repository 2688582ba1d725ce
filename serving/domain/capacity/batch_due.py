"""Batch work and when it is due, as gateways tell it to a policy: numbers under names. Pure.

    due|<model>|<when, Unix seconds>      requests that have to be answered by then, and are not
    due|<model>|input_tokens_mean         of those that were answered, if any was
    due|<model>|output_tokens_mean

Every gateway tells the work of all of them, because all see the same batches.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

_BAR, _DUE = "|", "due"
_INPUT, _OUTPUT = "input_tokens_mean", "output_tokens_mean"
# Work that is due by the last moment is late when a line is refused once.
_EARLIER = 0.05
# A report stays small however many batches there are.
MOST_DATES = 8


@dataclass(frozen=True, slots=True)
class DueWork:
    """So many requests that have to be answered by `due_at_s`, Unix seconds."""

    due_at_s: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class BatchDue:
    """The batch work of one model, the earliest first; means are `None` until any was answered."""

    work: tuple[DueWork, ...] = ()
    input_tokens_mean: float | None = None
    output_tokens_mean: float | None = None

    @property
    def num_requests(self) -> int:
        """All requests that are due at some time."""
        return sum(each.num_requests for each in self.work)


NOTHING_DUE = BatchDue()


def last_moment_s(created_at_s: float, expires_at_s: float) -> float:
    """Returns when a batch's lines are to be answered: a little before its window is over."""
    return expires_at_s - _EARLIER * (expires_at_s - created_at_s)


def coalesced(work: Iterable[DueWork], most: int = MOST_DATES) -> tuple[DueWork, ...]:
    """Returns the work at so many dates at most, none of it later than it is due.

    Dates become one where that brings work forward least.
    """
    by_date: defaultdict[float, int] = defaultdict(int)
    for each in work:
        if each.num_requests > 0:
            by_date[each.due_at_s] += each.num_requests
    dates = [DueWork(at_s, count) for at_s, count in sorted(by_date.items())]
    while len(dates) > most:
        costs = [
            (later.due_at_s - sooner.due_at_s) * later.num_requests
            for sooner, later in pairwise(dates)
        ]
        at = costs.index(min(costs))
        sooner, later = dates[at : at + 2]
        dates[at : at + 2] = [DueWork(sooner.due_at_s, sooner.num_requests + later.num_requests)]
    return tuple(dates)


def due_stats(model: str, due: BatchDue) -> dict[str, float]:
    """Returns the batch work of a model as stats; none where none is due."""
    if not due.work:
        return {}
    means = {_INPUT: due.input_tokens_mean, _OUTPUT: due.output_tokens_mean}
    stats = {
        _BAR.join((_DUE, model, f"{each.due_at_s:.0f}")): float(each.num_requests)
        for each in due.work
    }
    return stats | {
        _BAR.join((_DUE, model, what)): value for what, value in means.items() if value is not None
    }


def due_of_stats(model: str, stats: Mapping[str, float]) -> BatchDue:
    """Returns the batch work of a model; nothing where the stats have none."""
    start = _BAR.join((_DUE, model, ""))
    values = {
        name.removeprefix(start): value for name, value in stats.items() if name.startswith(start)
    }
    work = [
        DueWork(float(when), round(count))
        for when, count in values.items()
        if when.lstrip("-").isdigit()
    ]
    return BatchDue(
        tuple(sorted(work, key=lambda each: each.due_at_s)),
        values.get(_INPUT),
        values.get(_OUTPUT),
    )
