"""The cheapest portfolio of slices from several classes, some of which are lost together. Pure.

Two constraints: `total` slices in all, and `floor` of them left whichever one group of revocable
slices is lost. The second means that a group may have at most `total - floor` slices, so it can be
met with more expensive slices that are not revocable, or with more cheap ones spread over more
groups. For a given total the cheapest portfolio takes the cheapest classes first, each up to its
own bound and its group's; buying more than the total is tried as long as it can pay. That is exact,
not a heuristic.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ClassOption:
    """The supply of a class: `at_least` to `at_most` slices at `usd_per_hour` each.

    `group` names what is lost together with it, `None` for a class that is not revocable. The price
    is what a useful hour costs; 0 for what is paid anyway. `outages_per_hour` is how often all of
    it goes at once, `lead_h` how many hours it then takes to replace it.
    """

    name: str
    usd_per_hour: float
    at_least: int
    at_most: int
    group: str | None = None
    outages_per_hour: float = 0.0
    lead_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Portfolio:
    """The slices by class, and what they cost in an hour.

    `missing` are slices of the total that no class can supply. `unsafe` are slices of the floor
    that no portfolio can keep. Both are 0 where the options suffice.
    """

    slices: Mapping[str, int]
    usd_per_hour: float
    missing: int = 0
    unsafe: int = 0


def safest_worth_buying(
    total: int,
    floor: int,
    demand: float,
    options: Sequence[ClassOption],
    shortage_usd_per_hour: float,
) -> Portfolio:
    """The portfolio that is cheapest including what its outages are expected to cost.

    Beyond the `floor` that is asked for, safety is bought as long as it is cheaper than the
    shortages that it prevents: how often a group goes, for how long, and by how many slices of
    `demand` the rest then falls short. Cost and expected shortage are convex, so slices are added,
    given up and moved between classes, from the cheapest portfolio on, until none of that pays.
    """

    def rank(portfolio: Portfolio) -> tuple[int, int, float, int]:
        """At equal cost, the one that keeps more slices wins."""
        shortage = _expected_shortage(portfolio, demand, options)
        usd = portfolio.usd_per_hour + shortage * shortage_usd_per_hour
        return portfolio.missing, portfolio.unsafe, round(usd, 6), _most_lost(portfolio, options)

    best = cheapest_portfolio(total, floor, options)
    step = max(1, total // 12)
    while True:
        changed = _changed(best, options, step)
        portfolios = (_portfolio_of(slices, total, floor, options) for slices in changed)
        better = min(portfolios, key=rank, default=best)
        if rank(better) < rank(best):
            best = better
        elif step > 1:
            step //= 2
        else:
            return best


def _changed(
    portfolio: Portfolio, options: Sequence[ClassOption], step: int
) -> Iterator[dict[str, int]]:
    """Yields every portfolio that is one change of at most `step` slices away."""
    more = {o.name: min(step, o.at_most - portfolio.slices[o.name]) for o in options}
    fewer = {o.name: min(step, portfolio.slices[o.name] - o.at_least) for o in options}
    for name in more:
        if more[name] > 0:
            yield {**portfolio.slices, name: portfolio.slices[name] + more[name]}
        if fewer[name] <= 0:
            continue
        yield {**portfolio.slices, name: portfolio.slices[name] - fewer[name]}
        for other in more:
            moved = min(fewer[name], more[other])
            if other != name and moved > 0:
                changed = {**portfolio.slices, name: portfolio.slices[name] - moved}
                changed[other] += moved
                yield changed


def _portfolio_of(
    slices: Mapping[str, int], total: int, floor: int, options: Sequence[ClassOption]
) -> Portfolio:
    cost = sum(option.usd_per_hour * slices[option.name] for option in options)
    bought = sum(slices.values())
    portfolio = Portfolio(slices, cost, missing=max(0, total - bought))
    left = bought - _most_lost(portfolio, options)
    return replace(portfolio, unsafe=max(0, min(floor, total) - left))


def _expected_shortage(
    portfolio: Portfolio, demand: float, options: Sequence[ClassOption]
) -> float:
    """Returns how many slices are missing because of outages, on average over time."""
    total = sum(portfolio.slices.values())
    expected = 0.0
    for group in {option.group for option in options if option.group is not None}:
        members = [option for option in options if option.group == group]
        lost = sum(portfolio.slices[option.name] for option in members)
        outages = max(option.outages_per_hour for option in members)
        lead_h = max(option.lead_h for option in members)
        expected += outages * lead_h * max(0.0, demand - (total - lost))
    return expected


def cheapest_portfolio(total: int, floor: int, options: Sequence[ClassOption]) -> Portfolio:
    """The cheapest portfolio of at least `total` slices that leaves `floor` when a group is lost.

    Where the options do not suffice, as many slices as there are, and as safe as they can be: the
    total comes before the floor. Equal prices are taken in the order of `options`.
    """
    floor = min(floor, total)
    ranked = sorted(options, key=lambda option: option.usd_per_hour)
    most = _most_worth_buying(total, floor, options)
    step = max(1, (most - total) // 32)
    best: Portfolio | None = None
    for bought in range(total, most + 1, step):
        slices = _filled(bought, bought - floor, ranked)
        portfolio = _portfolio_of(slices, total, floor, ranked)
        if best is None or _rank(portfolio) < _rank(best):
            best = portfolio
    assert best is not None  # the range holds `total`
    if best.missing:
        # Better unsafe than too few.
        whole = _portfolio_of(_filled(total, None, ranked), total, floor, ranked)
        best = whole if whole.missing < best.missing else best
    return best


def _most_worth_buying(total: int, floor: int, options: Sequence[ClassOption]) -> int:
    """Returns the number of slices beyond which more is never cheaper.

    It covers the total, the floor on all groups but one, and the floor beside what is kept anyway.
    """
    revocable = [option for option in options if option.group is not None and option.at_most]
    kept = sum(option.at_least for option in options)
    num_groups = len({option.group for option in revocable})
    spread = 0 if num_groups < 2 else -(-floor * num_groups // (num_groups - 1))
    return max(total, spread, floor + kept)


def _rank(portfolio: Portfolio) -> tuple[int, int, float, int]:
    return (
        portfolio.missing,
        portfolio.unsafe,
        portfolio.usd_per_hour,
        sum(portfolio.slices.values()),
    )


def _filled(
    bought: int, most_of_group: int | None, ranked: Sequence[ClassOption]
) -> dict[str, int]:
    """Buys `bought` slices, the cheapest first; no group gets more than `most_of_group`."""
    slices = {option.name: option.at_least for option in ranked}
    of_group: dict[str, int] = {}
    for option in ranked:
        if option.group is not None:
            of_group[option.group] = of_group.get(option.group, 0) + option.at_least
    left = bought - sum(slices.values())
    for option in ranked:
        more = min(left, option.at_most - slices[option.name])
        if option.group is not None and most_of_group is not None:
            more = min(more, most_of_group - of_group[option.group])
        if more <= 0:
            continue
        slices[option.name] += more
        left -= more
        if option.group is not None:
            of_group[option.group] += more
    return slices


def _most_lost(portfolio: Portfolio, options: Sequence[ClassOption]) -> int:
    """The slices of the group that has most of them."""
    lost: dict[str, int] = {}
    for option in options:
        if option.group is not None:
            lost[option.group] = lost.get(option.group, 0) + portfolio.slices[option.name]
    return max(lost.values(), default=0)
