"""The cheapest portfolio of slices from several classes, some of which are lost together. Pure.

Two constraints: `total` slices in all, and `floor` of them left whichever one group of revocable
slices is lost. The second means that a group may have at most `total - floor` slices, so it can be
met with more expensive slices that are not revocable, or with more cheap ones spread over more
groups. For a given total the cheapest portfolio takes the cheapest classes first, each up to its
own bound and its group's; buying more than the total is tried as long as it can pay. That is exact,
not a heuristic, where all slices are of one shape.

A slice of another shape counts as `weight` of those of the model's own. Which shape is cheapest
depends on what is left to cover, so every number of slices of each other shape is tried, each
filled as above. That is as good as it gets without a solver: what it costs more than the best mix
is at most the price of a slice or two where shapes share a group.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

# What is carried is a sum of weights, and not exact.
_ROUNDING = 1e-6
# Of the slices of one other shape so many numbers are tried at most.
_MOST_TRIED = 24
# Shapes are exchanged where all of it costs more than so many times as much without that.
_EXCHANGE_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class ClassOption:
    """The supply of a class: `at_least` to `at_most` slices at `usd_per_hour` each.

    `group` names what is lost together with it, `None` for a class that is not revocable. The price
    is what a useful hour costs; 0 for what is paid anyway. `outages_per_hour` is how often all of
    it goes at once, `lead_h` how many hours it then takes to replace it. `weight` is what one slice
    carries, in slices of the model's own shape. `held` are those that are there.
    """

    name: str
    usd_per_hour: float
    at_least: int
    at_most: int
    group: str | None = None
    outages_per_hour: float = 0.0
    lead_h: float = 0.0
    weight: float = 1.0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Portfolio:
    """The slices by class, what they cost in an hour, and what they carry.

    `carried`, like all that follows, is in slices of the model's own shape. `missing` are slices of
    the total that no class can supply. `unsafe` are slices of the floor that no portfolio can keep.
    Both are 0 where the options suffice.
    """

    slices: Mapping[str, int]
    usd_per_hour: float
    carried: float = 0.0
    missing: float = 0
    unsafe: float = 0


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
            return _portfolio_of(slices, total, floor, options)


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


def as_many(carried: float, weight: float) -> int:
    """Returns the slices of a weight that carry so much. Rounding errors do not cost a slice."""
    return max(0, math.ceil(carried / weight - _ROUNDING))


def num_within(carried: float, weight: float) -> int:
    """Returns the slices of a weight that carry no more than so much."""
    return max(0, math.floor(carried / weight + _ROUNDING))


def _portfolio_of(
    slices: Mapping[str, int], total: int, floor: float, options: Sequence[ClassOption]
) -> Portfolio:
    cost = sum(option.usd_per_hour * slices[option.name] for option in options)
    carried = _rounded(sum(option.weight * slices[option.name] for option in options))
    portfolio = Portfolio(slices, cost, carried, missing=max(0, total - carried))
    left = carried - _most_lost(portfolio, options)
    return replace(portfolio, unsafe=max(0, min(floor, total) - left))


def _rounded(carried: float) -> float:
    return round(carried, 6)


def cheapest_portfolio(
    total: int, floor: float, options: Sequence[ClassOption], max_slices: float = math.inf
) -> Portfolio:
    """The cheapest portfolio of at least `total` slices that leaves `floor` when a group is lost.

    Where the options do not suffice, as many slices as there are, and as safe as they can be: the
    total comes before the floor, and `max_slices`, of whatever shape, before both. Equal prices are
    taken in the order of `options`.
    """
    floor = min(floor, total)
    ranked = sorted(options, key=lambda option: option.usd_per_hour / option.weight)
    most = _most_worth_buying(total, floor, options)
    if len({option.weight for option in options}) == 1:
        most = math.floor(max(total, min(most, max_slices)))
    step = max(1, (most - total) // 32)
    found = [
        _portfolio_of(_filled(bought, bought - floor, ranked, kept), total, floor, ranked)
        for kept in _of_other_shapes(ranked, most)
        for bought in range(total, most + 1, step)
    ]
    allowed = [each for each in found if _num_slices(each) <= max_slices]
    best = _least_changed(allowed or [min(found, key=_num_slices)], ranked)
    if best.missing:
        # Better unsafe than too few.
        whole = [
            _portfolio_of(_filled(total, None, ranked, kept), total, floor, ranked)
            for kept in _of_other_shapes(ranked, total)
        ]
        within = (each for each in whole if _num_slices(each) <= max_slices)
        best = min([best, *within], key=lambda each: each.missing)
    return best


def _num_slices(portfolio: Portfolio) -> int:
    return sum(portfolio.slices.values())


def _least_changed(found: Sequence[Portfolio], options: Sequence[ClassOption]) -> Portfolio:
    """Returns the best portfolio, or the best that exchanges no shape unless that costs much more.

    An exchange is paid for while the new slice loads and the old one waits to go, and need turns
    some times an hour.
    """
    best = min(found, key=_rank)
    weights = {option.weight for option in options}
    if len(weights) == 1:
        return best
    held = {weight: sum(o.held for o in options if o.weight == weight) for weight in weights}

    def exchanges(portfolio: Portfolio) -> bool:
        changes = [
            sum(portfolio.slices[o.name] for o in options if o.weight == weight) - held[weight]
            for weight in weights
        ]
        return min(changes) < 0 < max(changes)

    kept = min((each for each in found if not exchanges(each)), key=_rank, default=best)
    is_as_good = (kept.missing, kept.unsafe) <= (best.missing, best.unsafe)
    if is_as_good and kept.usd_per_hour <= _EXCHANGE_FACTOR * best.usd_per_hour:
        return kept
    return best


def _of_other_shapes(ranked: Sequence[ClassOption], most: int) -> Iterator[Mapping[float, int]]:
    """Yields how many slices of each shape but the smallest there may be, by weight.

    With one shape that is nothing, once. Of large numbers not every one is tried.
    """
    weights = sorted({option.weight for option in ranked})[1:]
    ranges = []
    for weight in weights:
        of_shape = [option for option in ranked if option.weight == weight]
        least = sum(option.at_least for option in of_shape)
        last = min(sum(option.at_most for option in of_shape), as_many(most, weight))
        step = max(1, (last - least) // _MOST_TRIED)
        ranges.append(sorted({*range(least, last + 1, step), max(least, last)}))
    for counts in itertools.product(*ranges):
        yield dict(zip(weights, counts, strict=True))


def _most_worth_buying(total: int, floor: float, options: Sequence[ClassOption]) -> int:
    """Returns what more than is never cheaper to buy.

    It covers the total, the floor on all groups but one, and the floor beside what is kept anyway.
    """
    revocable = [option for option in options if option.group is not None and option.at_most]
    kept = sum(option.at_least * option.weight for option in options)
    num_groups = len({option.group for option in revocable})
    spread = 0 if num_groups < 2 else math.ceil(floor * num_groups / (num_groups - 1))
    # A large slice may carry more than there is room for, in each group.
    heaviest = max((option.weight for option in options), default=1.0)
    beyond = math.ceil((heaviest - 1) * max(1, num_groups))
    return max(total, spread, math.ceil(floor + kept)) + beyond


def _rank(portfolio: Portfolio) -> tuple[float, float, float, float]:
    missing, unsafe = portfolio.missing, portfolio.unsafe
    return missing, unsafe, portfolio.usd_per_hour, _num_slices(portfolio)


def _filled(
    bought: int,
    most_of_group: float | None,
    ranked: Sequence[ClassOption],
    kept: Mapping[float, int],
) -> dict[str, int]:
    """Buys `bought` slices, the cheapest first; no group gets more than `most_of_group`.

    Of each shape in `kept`, by weight, there are so many, and of the smallest what is then left.
    """
    slices = {option.name: option.at_least for option in ranked}
    of_group: dict[str, float] = {}
    for option in ranked:
        if option.group is not None:
            carried = option.at_least * option.weight
            of_group[option.group] = of_group.get(option.group, 0) + carried
    left = bought - sum(option.weight * slices[option.name] for option in ranked)
    left_of = {
        weight: count - sum(o.at_least for o in ranked if o.weight == weight)
        for weight, count in kept.items()
    }
    # Other shapes first: how many there are is settled.
    for option in sorted(ranked, key=lambda option: option.weight not in kept):
        more = option.at_most - slices[option.name]
        if option.weight in left_of:
            more = min(more, left_of[option.weight])
        else:
            more = min(more, as_many(left, option.weight))
        if option.group is not None and most_of_group is not None:
            room = most_of_group - of_group[option.group]
            more = min(more, num_within(room, option.weight))
        if more <= 0:
            continue
        slices[option.name] += more
        left -= more * option.weight
        if option.weight in left_of:
            left_of[option.weight] -= more
        if option.group is not None:
            of_group[option.group] += more * option.weight
    return slices


def _most_lost(portfolio: Portfolio, options: Sequence[ClassOption]) -> float:
    """The slices of the group that has most of them."""
    lost: dict[str, float] = {}
    for option in options:
        if option.group is not None:
            carried = option.weight * portfolio.slices[option.name]
            lost[option.group] = lost.get(option.group, 0) + carried
    return _rounded(max(lost.values(), default=0))
