"""Decides which slices a sooner class brings until a slower one delivers. Pure.

A portfolio is the cheapest one once all of it is there. A class in it may deliver minutes after
another would, and whoever waits for it is short meanwhile: a group of spot is lost, say, and what
replaces it for good is flex-start, in ten minutes. So what will not be there when a sooner class
could deliver is asked of that one as well, and goes when the slower one has delivered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.mix.portfolio import ClassOption, as_many
from autoscaling.records import Fleet
from serving.domain.slice_lifecycle import SliceState

# Of two classes that deliver within so long of each other neither is the sooner.
_ALIKE_S = 60.0


@dataclass(frozen=True, slots=True)
class Stopgap:
    """So many slices of a class because `short` lack until slower classes deliver in `until_s`.

    `short` is in slices of the model's own shape.
    """

    count: int
    short: float
    until_s: float

    @property
    def words(self) -> str:
        """The reason, for a decision."""
        return f"{self.short:.1f} lack until slower classes deliver in {self.until_s:.0f} s"


def stopgaps(
    now_s: float,
    fleet: Fleet,
    classes: Mapping[str, ClassHistory],
    options: Sequence[ClassOption],
    planned: Mapping[str, int],
    need: float,
) -> Mapping[str, Stopgap]:
    """Returns what classes are asked for beyond `planned`, whose slices are to carry `need`.

    `options` are what can be relied on. What is there already, or on its way, comes before what
    would have to be ordered, and then the cheapest of those that are sooner.
    """
    coming = _Coming(now_s, fleet, classes, options, planned)
    by_price = sorted(options, key=lambda each: each.usd_per_hour / each.weight)
    for option in by_price:
        coming.ask(option, coming.num_beyond(option.name), coming.last_s(option.name), need)
    for option in by_price:
        history = classes[option.name]
        if history.is_healthy(now_s):
            coming.ask(option, option.at_most, history.lead_s, need)
    return coming.asked


class _Coming:
    """What will be there by when: of `planned` slices, and of those that are asked for besides."""

    def __init__(
        self,
        now_s: float,
        fleet: Fleet,
        classes: Mapping[str, ClassHistory],
        options: Sequence[ClassOption],
        planned: Mapping[str, int],
    ) -> None:
        self._now_s, self._classes = now_s, classes
        self._slices = {name: fleet.of_class(name) for name in planned}
        self._expected = {
            name: classes[name].expected(slices, now_s) for name, slices in self._slices.items()
        }
        self._weights = {each.name: each.weight for each in options}
        self._planned = planned
        leads_s = (classes[name].lead_s for name, count in planned.items() if count)
        self._until_s = max(leads_s, default=0.0)
        self.asked: dict[str, Stopgap] = {}

    def ask(self, option: ClassOption, most: int, within_s: float, need: float) -> None:
        """Asks a class, for `most` slices more, for what lacks when it could have brought it."""
        short = need - self._carried_about(within_s)
        before = self.asked[option.name].count if option.name in self.asked else 0
        room = option.at_most - self._planned[option.name] - before
        count = min(most, room, as_many(short, option.weight))
        if count > 0:
            self.asked[option.name] = Stopgap(before + count, round(short, 6), self._until_s)

    def num_beyond(self, name: str) -> int:
        """The slices of a class that are there or on their way, beyond the planned ones."""
        slices = self._slices[name]
        num_there = sum(each.state != SliceState.DRAINING for each in slices)
        return max(0, num_there - self._planned[name])

    def last_s(self, name: str) -> float:
        """In how long the last of the class will be ready that is on its way; 0: all are."""
        etas_s = (
            self._classes[name].eta_s(each)
            for each in self._slices[name]
            if each.state not in (SliceState.DRAINING, SliceState.READY)
        )
        return max(0.0, max(etas_s, default=0.0) - self._now_s)

    def _carried_about(self, within_s: float) -> float:
        # What ends within that minute is not short by then, and what comes in it is no longer.
        return max(self._carried(within_s), self._carried(within_s + _ALIKE_S))

    def _carried(self, within_s: float) -> float:
        """What is there within so long.

        A class that delivers by then has all that is asked of it; one that does not, or backs off,
        what is there already or on its way.
        """
        total = 0.0
        for name, count in self._planned.items():
            history = self._classes[name]
            if name in self.asked:
                count += self.asked[name].count
            if not (history.is_healthy(self._now_s) and history.lead_s <= within_s):
                count = min(count, self._expected[name].num_within(within_s))
            total += count * self._weights[name]
        return total
