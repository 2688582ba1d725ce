"""Decides how much of a floor is kept at any price. Pure.

A floor is what is left when a group of revocable slices is lost. Spread over groups of about one
price it costs little. Where only one such group delivers, it takes slices that cost several times
as much, for as long as the others are gone, which may be days; and what it saves is a share of the
requests of the minutes until the lost slices are replaced. So up to a price the floor is a rule,
and beyond it safety is bought by what it is worth, as is all safety beyond the floor
(`safety`).
"""

from collections import defaultdict
from collections.abc import Sequence

from autoscaling.policy.mix.portfolio import ClassOption, as_many


def floor_within(
    price_ratio: float, total: int, floor: float, options: Sequence[ClassOption]
) -> float:
    """Returns how much of `floor` slices of a `total` is kept as a rule.

    It is what can be left by classes of which a slice's work costs at most `price_ratio` times what
    it does of the cheapest one that has any and is not paid for anyway. Slices that the total takes
    of dearer classes count as well.
    """
    usable = [each for each in options if each.at_most > 0]
    prices = [each.usd_per_hour / each.weight for each in usable if each.usd_per_hour > 0]
    most_usd = price_ratio * min(prices, default=0.0)
    lasting = 0.0
    of_group: defaultdict[str, float] = defaultdict(float)
    for each in usable:
        if each.usd_per_hour / each.weight > most_usd:
            continue
        if each.group is None:
            lasting += each.at_most * each.weight
        else:
            of_group[each.group] += each.at_most * each.weight
    lost = _evenly(max(0.0, total - lasting), list(of_group.values()))
    # Whole slices: of what is spread over groups, one has the odd one.
    return min(floor, max(0.0, total - as_many(lost, 1.0)))


def _evenly(count: float, groups: Sequence[float]) -> float:
    """Returns the most that any group has where they have `count` together, as evenly as can be.

    All of each where they do not have as many.
    """
    level = 0.0
    for place, room in enumerate(sorted(groups)):
        sharing = len(groups) - place
        if (room - level) * sharing >= count:
            return level + count / sharing
        count -= (room - level) * sharing
        level = room
    return level
