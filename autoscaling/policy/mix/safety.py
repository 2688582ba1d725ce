"""Decides how much safety is bought beyond a floor: as long as it costs less than it prevents.

Pure.
"""

import math
from collections.abc import Iterator, Sequence

from autoscaling.policy.mix.portfolio import (
    ClassOption,
    Portfolio,
    cheapest_portfolio,
    portfolio_of,
)


def safest_worth_buying(
    total: int,
    floor: float,
    demand: float,
    options: Sequence[ClassOption],
    shortage_usd_per_hour: float,
    max_slices: float = math.inf,
) -> Portfolio:
    """The portfolio that is cheapest including what its outages are expected to cost.

    Beyond the `floor` that is asked for, safety is bought as long as it is cheaper than the
    shortages that it prevents: how often a group goes, for how long, and by how many slices of
    `demand` the rest then falls short. Cost and expected shortage are convex, so slices are added,
    given up and moved between classes, from the cheapest portfolio on, until none of that pays.
    It has `max_slices` at most, whatever they would prevent.
    """
    best = cheapest_portfolio(total, floor, options, max_slices)
    judge = _Judge(total, floor, demand, options, shortage_usd_per_hour)
    counts = tuple(best.slices[option.name] for option in options)
    rank = judge.rank(counts)
    step = max(1, total // 12)
    while True:
        room = max_slices - sum(counts)
        better = min(_changed(counts, options, step, room), key=judge.rank, default=counts)
        of_better = judge.rank(better)
        if of_better < rank:
            counts, rank = better, of_better
        elif step > 1:
            step //= 2
        else:
            slices = {each.name: count for each, count in zip(options, counts, strict=True)}
            return portfolio_of(slices, total, floor, options)


# The least first.
_Rank = tuple[float, float, float, float]


class _Judge:
    """Ranks how many slices there are of each option, the least first.

    Hundreds are ranked for one portfolio, many of them several times, so that what all have in
    common is looked up once, and a rank is kept.
    """

    def __init__(
        self,
        total: int,
        floor: float,
        demand: float,
        options: Sequence[ClassOption],
        shortage_usd_per_hour: float,
    ) -> None:
        self._total, self._floor, self._demand = total, min(floor, total), demand
        self._shortage_usd_per_hour = shortage_usd_per_hour
        self._ranks: dict[tuple[int, ...], _Rank] = {}
        groups = list(dict.fromkeys(each.group for each in options if each.group is not None))
        self._options = [
            (each.usd_per_hour, each.weight, -1 if each.group is None else groups.index(each.group))
            for each in options
        ]
        # How much of the time a group is gone.
        self._gone = []
        for group in groups:
            members = [each for each in options if each.group == group]
            outages = max(each.outages_per_hour for each in members)
            self._gone.append(outages * max(each.lead_h for each in members))

    def rank(self, counts: tuple[int, ...]) -> _Rank:
        """What is missing, unsafe, its cost with what shortages cost, and the most that is lost.

        At equal cost, the one that keeps more slices wins.
        """
        rank = self._ranks.get(counts)
        if rank is None:
            rank = self._ranks[counts] = self._rank(counts)
        return rank

    def _rank(self, counts: tuple[int, ...]) -> _Rank:
        usd = carried = 0.0
        lost = [0.0] * len(self._gone)
        for count, (price, weight, group) in zip(counts, self._options, strict=True):
            usd += price * count
            of_option = weight * count
            carried += of_option
            if group >= 0:
                lost[group] += of_option
        carried = round(carried, 6)
        shortage = most_lost = 0.0
        for gone, of_group in zip(self._gone, lost, strict=True):
            most_lost = max(most_lost, of_group)
            lacks = self._demand - carried + of_group
            if lacks > 0:
                shortage += gone * lacks
        most_lost = round(most_lost, 6)
        missing = max(0.0, self._total - carried)
        unsafe = max(0.0, self._floor - (carried - most_lost))
        usd += shortage * self._shortage_usd_per_hour
        return missing, unsafe, round(usd, 6), most_lost


def _changed(
    counts: tuple[int, ...], options: Sequence[ClassOption], step: int, room: float
) -> Iterator[tuple[int, ...]]:
    """Yields every portfolio that is one change of at most `step` slices away.

    No change adds more than `room`. How many there are of each shape is settled before: slices move
    between classes of one shape.
    """
    more = [min(step, o.at_most - count) for o, count in zip(options, counts, strict=True)]
    fewer = [min(step, count - o.at_least) for o, count in zip(options, counts, strict=True)]
    for at, option in enumerate(options):
        if 0 < more[at] <= room:
            yield (*counts[:at], counts[at] + more[at], *counts[at + 1 :])
        if fewer[at] <= 0:
            continue
        yield (*counts[:at], counts[at] - fewer[at], *counts[at + 1 :])
        for to, other in enumerate(options):
            if to == at or more[to] <= 0 or other.weight != option.weight:
                continue
            moved = min(fewer[at], more[to])
            changed = list(counts)
            changed[at] -= moved
            changed[to] += moved
            yield tuple(changed)
