"""The cheapest way to buy so many slices of several classes, some of which are lost together. Pure.

Two constraints: `total` slices in all, and `floor` of them left whichever one group of revocable
slices is lost. The second says that a group may have at most `total - floor` slices, so it can be
met with dearer slices that are not revocable, or with more cheap ones spread over more groups. For
a given total the cheapest mix takes the cheapest classes first, each up to its own bound and its
group's; buying more than the total is tried as long as it can pay. That is exact, not a heuristic.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Offer:
    """What a class can give: `at_least` to `at_most` slices at `usd_per_hour` each.

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
class Mix:
    """Slices by class, and what they cost in an hour.

    `missing` are those of the total that nobody can give, `unsafe` those of the floor that no mix
    can keep; both 0 where the offers suffice.
    """

    slices: Mapping[str, int]
    usd_per_hour: float
    missing: int = 0
    unsafe: int = 0


def safest_worth_buying(
    total: int,
    floor: int,
    demand: float,
    offers: Sequence[Offer],
    shortage_usd_per_hour: float,
) -> Mix:
    """The mix that is cheapest with what outages are expected to cost.

    Beyond the `floor` that is asked for, safety is bought as long as it is cheaper than the
    shortages that it prevents: how often a group goes, for how long, and by how many slices of
    `demand` the rest then falls short. Cost and expected shortage are convex, so slices are added,
    given up and moved between classes, from the cheapest mix on, until none of that pays.
    """
    best = cheapest_mix(total, floor, offers)
    wanted = _Wanted(total, min(floor, total), demand, shortage_usd_per_hour)
    best_rank = _rank_all_told(best, wanted, offers)
    step = max(1, total // 12)
    while True:
        mixes = (_mix_of(slices, wanted, offers) for slices in _changed(best, offers, step))
        ranked = [(_rank_all_told(mix, wanted, offers), mix) for mix in mixes]
        rank, mix = min(ranked, key=lambda each: each[0], default=(best_rank, best))
        if rank < best_rank:
            best_rank, best = rank, mix
        elif step > 1:
            step //= 2
        else:
            return best


@dataclass(frozen=True, slots=True)
class _Wanted:
    total: int
    floor: int
    demand: float
    shortage_usd_per_hour: float


def _changed(mix: Mix, offers: Sequence[Offer], step: int) -> Iterator[dict[str, int]]:
    """Every mix that is one change of at most `step` slices away."""
    more = {o.name: min(step, o.at_most - mix.slices[o.name]) for o in offers}
    fewer = {o.name: min(step, mix.slices[o.name] - o.at_least) for o in offers}
    for name in more:
        if more[name] > 0:
            yield {**mix.slices, name: mix.slices[name] + more[name]}
        if fewer[name] <= 0:
            continue
        yield {**mix.slices, name: mix.slices[name] - fewer[name]}
        for other in more:
            moved = min(fewer[name], more[other])
            if other != name and moved > 0:
                changed = {**mix.slices, name: mix.slices[name] - moved}
                changed[other] += moved
                yield changed


def _mix_of(slices: Mapping[str, int], wanted: _Wanted, offers: Sequence[Offer]) -> Mix:
    cost = sum(offer.usd_per_hour * slices[offer.name] for offer in offers)
    mix = Mix(slices, cost, missing=max(0, wanted.total - sum(slices.values())))
    return _with_unsafe(mix, wanted.floor, offers)


def _rank_all_told(
    mix: Mix, wanted: _Wanted, offers: Sequence[Offer]
) -> tuple[int, int, float, int]:
    """Lower is better. Of two that cost the same, the one that keeps more is."""
    shortage = _expected_shortage(mix, wanted.demand, offers)
    usd = mix.usd_per_hour + shortage * wanted.shortage_usd_per_hour
    return (mix.missing, mix.unsafe, round(usd, 6), _most_lost(mix, offers))


def _expected_shortage(mix: Mix, demand: float, offers: Sequence[Offer]) -> float:
    """Slices short because of outages, on average over time."""
    total = sum(mix.slices.values())
    expected = 0.0
    for group in {offer.group for offer in offers if offer.group is not None}:
        members = [offer for offer in offers if offer.group == group]
        lost = sum(mix.slices[offer.name] for offer in members)
        outages = max(offer.outages_per_hour for offer in members)
        lead_h = max(offer.lead_h for offer in members)
        expected += outages * lead_h * max(0.0, demand - (total - lost))
    return expected


def cheapest_mix(total: int, floor: int, offers: Sequence[Offer]) -> Mix:
    """The cheapest mix of at least `total` slices that leaves `floor` when a group is lost.

    Where the offers do not suffice, as many slices as there are, and as safe as they can be: the
    total comes before the floor. Equal prices are taken in the order of `offers`.
    """
    floor = min(floor, total)
    ranked = sorted(offers, key=lambda offer: offer.usd_per_hour)
    most = _most_worth_buying(total, floor, offers)
    step = max(1, (most - total) // 32)
    best: Mix | None = None
    for bought in range(total, most + 1, step):
        mix = _filled(total, bought, bought - floor, ranked)
        mix = _with_unsafe(mix, floor, ranked)
        if best is None or _rank(mix) < _rank(best):
            best = mix
    assert best is not None  # the range holds `total`
    if best.missing:
        # Better unsafe than too few.
        whole = _with_unsafe(_filled(total, total, None, ranked), floor, ranked)
        best = whole if whole.missing < best.missing else best
    return best


def _most_worth_buying(total: int, floor: int, offers: Sequence[Offer]) -> int:
    """More than this is never cheaper: the floor on all groups but one, and what is kept anyway."""
    revocable = [offer for offer in offers if offer.group is not None and offer.at_most]
    kept = sum(offer.at_least for offer in offers)
    num_groups = len({offer.group for offer in revocable})
    spread = 0 if num_groups < 2 else -(-floor * num_groups // (num_groups - 1))
    return max(total, spread, floor + kept)


def _rank(mix: Mix) -> tuple[int, int, float, int]:
    return (mix.missing, mix.unsafe, mix.usd_per_hour, sum(mix.slices.values()))


def _filled(total: int, bought: int, most_of_group: int | None, ranked: Sequence[Offer]) -> Mix:
    """`bought` slices, the cheapest first; no group gets more than `most_of_group`."""
    slices = {offer.name: offer.at_least for offer in ranked}
    of_group: dict[str, int] = {}
    for offer in ranked:
        if offer.group is not None:
            of_group[offer.group] = of_group.get(offer.group, 0) + offer.at_least
    left = bought - sum(slices.values())
    for offer in ranked:
        more = min(left, offer.at_most - slices[offer.name])
        if offer.group is not None and most_of_group is not None:
            more = min(more, most_of_group - of_group[offer.group])
        if more <= 0:
            continue
        slices[offer.name] += more
        left -= more
        if offer.group is not None:
            of_group[offer.group] += more
    price = {offer.name: offer.usd_per_hour for offer in ranked}
    cost = sum(price[name] * count for name, count in slices.items())
    return Mix(slices, cost, missing=max(0, total - sum(slices.values())))


def _with_unsafe(mix: Mix, floor: int, offers: Sequence[Offer]) -> Mix:
    left = sum(mix.slices.values()) - _most_lost(mix, offers)
    return replace(mix, unsafe=max(0, floor - left))


def _most_lost(mix: Mix, offers: Sequence[Offer]) -> int:
    """The slices of the group that has most of them."""
    lost: dict[str, int] = {}
    for offer in offers:
        if offer.group is not None:
            lost[offer.group] = lost.get(offer.group, 0) + mix.slices[offer.name]
    return max(lost.values(), default=0)
