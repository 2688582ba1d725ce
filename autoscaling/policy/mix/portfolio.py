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
is at most the price of a slice or two where shapes share a group. Of more than a few hundred such
portfolios some are tried, and then those near the best (`grid_search`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaling.policy.mix.grid_search import Point, best_point, coarse_points

# What is carried is a sum of weights, and not exact.
_ROUNDING = 1e-6
# So many portfolios are all tried, in Serve's controller. Of more it takes some all over the grid,
# and those near the best: with three other shapes all would be half a million, and take seconds.
_MOST_TRIED = 300
_MOST_AT_FIRST = 100
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


def as_many(carried: float, weight: float) -> int:
    """Returns the slices of a weight that carry so much. Rounding errors do not cost a slice."""
    return max(0, math.ceil(carried / weight - _ROUNDING))


def num_within(carried: float, weight: float) -> int:
    """Returns the slices of a weight that carry no more than so much."""
    return max(0, math.floor(carried / weight + _ROUNDING))


def portfolio_of(
    slices: Mapping[str, int], total: int, floor: float, options: Sequence[ClassOption]
) -> Portfolio:
    """Returns the portfolio of so many slices by class, held against `total` and `floor`."""
    cost = sum(option.usd_per_hour * slices[option.name] for option in options)
    carried = _rounded(sum(option.weight * slices[option.name] for option in options))
    left = carried - _most_lost(slices, options)
    return Portfolio(
        slices,
        cost,
        carried,
        missing=max(0, total - carried),
        unsafe=max(0, min(floor, total) - left),
    )


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
        # Of large numbers not every one is tried.
        totals = range(total, most + 1, max(1, (most - total) // 32))
    else:
        totals = range(total, most + 1)
    tried = _Tried(total, floor, ranked, max_slices)
    found = tried.portfolios(totals, most, is_safe=True)
    allowed = [each for each in found if _num_slices(each) <= max_slices]
    best = _least_changed(allowed or [min(found, key=_num_slices)], ranked)
    if best.missing:
        # Better unsafe than too few.
        whole = tried.portfolios(range(total, total + 1), total, is_safe=False)
        within = (each for each in whole if _num_slices(each) <= max_slices)
        best = min([best, *within], key=lambda each: each.missing)
    return best


class _Tried:
    """The portfolios that are tried for one total: filled for so many slices of each shape."""

    def __init__(
        self, total: int, floor: float, ranked: Sequence[ClassOption], max_slices: float
    ) -> None:
        self._total, self._floor, self._ranked = total, floor, ranked
        self._max_slices = max_slices
        # Of the shapes but the smallest.
        self._weights = sorted({option.weight for option in ranked})[1:]

    def portfolios(self, totals: range, most: int, *, is_safe: bool) -> list[Portfolio]:
        """Returns those that buy one of `totals` slices, at most `most` of them of one shape.

        With `is_safe` no group has more than leaves the floor.
        """
        axes = [*(self._numbers(weight, most) for weight in self._weights), totals]
        known: dict[Point, Portfolio] = {}

        def portfolio(point: Point) -> Portfolio:
            if point not in known:
                *counts, bought = point
                kept = dict(zip(self._weights, counts, strict=True))
                most_of_group = bought - self._floor if is_safe else None
                filled = _filled(bought, most_of_group, self._ranked, kept)
                known[point] = portfolio_of(filled, self._total, self._floor, self._ranked)
            return known[point]

        def rank(point: Point) -> tuple[float, ...]:
            found = portfolio(point)
            return max(0.0, _num_slices(found) - self._max_slices), *_rank(found)

        def rank_as_it_is(point: Point) -> tuple[float, ...]:
            over, missing, unsafe, *costs = rank(point)
            return over, missing, unsafe, _exchanges(portfolio(point), self._ranked), *costs

        if math.prod(len(axis) for axis in axes) <= _MOST_TRIED:
            return [portfolio(point) for point in itertools.product(*axes)]
        if not self._weights:
            return [portfolio((bought,)) for bought in totals]
        held = [(_num_held(self._ranked, weight),) for weight in self._weights]
        points = coarse_points(axes, [*held, ()], _MOST_AT_FIRST)
        best = best_point(axes, points, [*self._weights, 0.0], rank)
        if _exchanges(portfolio(best), self._ranked):
            best_point(axes, points, [*self._weights, 0.0], rank_as_it_is)
        return list(known.values())

    def _numbers(self, weight: float, most: int) -> range:
        """Returns how many slices of a shape there may be."""
        of_shape = [option for option in self._ranked if option.weight == weight]
        least = sum(option.at_least for option in of_shape)
        last = min(sum(option.at_most for option in of_shape), as_many(most, weight))
        return range(least, max(least, last) + 1)


def _num_held(options: Sequence[ClassOption], weight: float) -> int:
    return sum(option.held for option in options if option.weight == weight)


def _exchanges(portfolio: Portfolio, options: Sequence[ClassOption]) -> bool:
    """Returns whether slices of one shape take the place of slices of another that are there."""
    changes = [
        sum(portfolio.slices[o.name] for o in options if o.weight == weight)
        - _num_held(options, weight)
        for weight in {option.weight for option in options}
    ]
    return min(changes) < 0 < max(changes)


def _num_slices(portfolio: Portfolio) -> int:
    return sum(portfolio.slices.values())


def _least_changed(found: Sequence[Portfolio], options: Sequence[ClassOption]) -> Portfolio:
    """Returns the best portfolio, or the best that exchanges no shape unless that costs much more.

    An exchange is paid for while the new slice loads and the old one waits to go, and need turns
    some times an hour.
    """
    best = min(found, key=_rank)
    if not _exchanges(best, options):
        return best
    kept = min((each for each in found if not _exchanges(each, options)), key=_rank, default=best)
    is_as_good = (kept.missing, kept.unsafe) <= (best.missing, best.unsafe)
    if is_as_good and kept.usd_per_hour <= _EXCHANGE_FACTOR * best.usd_per_hour:
        return kept
    return best


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


def _most_lost(slices: Mapping[str, int], options: Sequence[ClassOption]) -> float:
    """The slices of the group that has most of them."""
    lost: dict[str, float] = {}
    for option in options:
        if option.group is not None:
            carried = option.weight * slices[option.name]
            lost[option.group] = lost.get(option.group, 0) + carried
    return _rounded(max(lost.values(), default=0))
