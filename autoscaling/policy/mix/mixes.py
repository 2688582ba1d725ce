"""The mixes of one model's classes: what can be had, and which portfolios are worth buying.

Owns what `portfolio` is asked: what each class can bring as things are, what a mix is to cover, and
the portfolios that were found for it. Deterministic: time comes in.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.mix.floors import floor_within
from autoscaling.policy.mix.portfolio import ClassOption, Portfolio
from autoscaling.policy.mix.safety import safest_worth_buying
from autoscaling.policy.quotas.records import ChipShare
from autoscaling.policy.rules import Rules
from autoscaling.records import Fleet
from serving.domain.slice_lifecycle import WAITING, SliceState

_MIXES_KEPT = 64


class MixCover(NamedTuple):
    """What a mix of slices is to cover: `need` of them, of which `floor` stay if a group is lost.

    `demand` is the mean, which outages are held against.
    """

    need: int
    floor: float
    demand: float


class ModelMixes:
    """The mixes of one model. No mix has more slices than its rules allow.

    `weight_of` tells what a slice of a class carries; 0: even an idle one is too slow. With
    `has_shapes` classes have slices of several shapes.
    """

    def __init__(
        self,
        rules: Rules,
        classes: Mapping[str, ClassHistory],
        weight_of: Callable[[str], float],
        *,
        has_shapes: bool,
    ) -> None:
        self._rules = rules
        self._classes = classes
        self._weight_of = weight_of
        self._has_shapes = has_shapes
        self._known: dict[object, Portfolio] = {}

    def options(
        self, now_s: float, fleet: Fleet, share: ChipShare
    ) -> tuple[list[ClassOption], list[ClassOption]]:
        """Returns what can be relied on, and what there is if every class delivered."""
        safe = []
        ideal = []
        for name, each in self._classes.items():
            terms, slices = each.terms, fleet.of_class(name)
            held = sum(
                1
                for view in slices
                if view.state not in WAITING and view.state != SliceState.DRAINING
            )
            most = min(terms.max_slices, share.most.get(name, terms.max_slices))
            weight = self._weight_of(name)
            if not weight:  # even an idle slice of that shape is too slow
                most = 0
            option = ClassOption(
                name,
                each.usd_per_useful_hour,
                min(terms.min_slices, most),
                most,
                terms.lost_with,
                each.outages_per_hour,
                each.lead_s / 3600,
                weight or 1.0,
                held if self._has_shapes else 0,
            )
            ideal.append(option)
            if not each.is_healthy(now_s):
                option = replace(option, at_most=min(most, max(held, option.at_least)))
            safe.append(option)
        return safe, ideal

    def hoped(
        self,
        now_s: float,
        cover: MixCover,
        ideal: Portfolio,
        reliable: Sequence[ClassOption],
        options: Sequence[ClassOption],
    ) -> Mapping[str, int]:
        """Returns how many slices each class is to have if it delivers.

        These are the `ideal` ones, if all classes do. That has none of a class that is dearer than
        others which back off as well: it would never be asked again, and never be seen to be back.
        So it is asked for what it would have if it were the only one of them to deliver.
        """
        hoped = dict(ideal.slices)
        for place, option in enumerate(options):
            name = option.name
            if hoped[name] == 0 and not self._classes[name].is_healthy(now_s):
                alone = [*reliable[:place], option, *reliable[place + 1 :]]
                hoped[name] = self.mix(cover, alone).slices[name]
        return hoped

    def mix(self, cover: MixCover, options: list[ClassOption]) -> Portfolio:
        """The portfolio worth buying, kept because most decisions ask for the same one again."""
        # Rounded: differences that hardly change the portfolio need no other one.
        need, demand = cover.need, round(cover.demand, 1)
        floor = floor_within(self._rules.floor_price_ratio, need, cover.floor, options)
        asked = (need, floor, demand, *(_rounded(option) for option in options))
        if asked not in self._known:
            if len(self._known) >= _MIXES_KEPT:
                self._known.clear()
            # The most that a slice's work costs, of the shape of which it costs least.
            by_shape: defaultdict[float, float] = defaultdict(float)
            for each in options:
                price = self._classes[each.name].terms.price / each.weight
                by_shape[each.weight] = max(by_shape[each.weight], price)
            dearest = min(by_shape.values())
            self._known[asked] = safest_worth_buying(
                need,
                floor,
                demand,
                options,
                self._rules.shortage_ratio * dearest,
                self._rules.max_slices,
            )
        return self._known[asked]


def _rounded(option: ClassOption) -> ClassOption:
    return replace(
        option,
        usd_per_hour=round(option.usd_per_hour, 2),
        outages_per_hour=round(option.outages_per_hour, 2),
        lead_h=round(option.lead_h, 3),
    )
