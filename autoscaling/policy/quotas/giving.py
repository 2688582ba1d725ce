"""Decides which slices models give up at once, because other models lack them. Pure.

A model of lower priority gives what it is to give. One of the same priority gives for work that is
there, until its own is served hardly better, and the rest once it has others in their place; one of
a higher priority keeps its own until then. Nothing is given that does not become a slice of another
model: where slices differ in size, several may be needed for one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from autoscaling.policy.quotas.records import ChipQuota, Member, SlicesAsked
from autoscaling.policy.quotas.shares import Shared

# Equals of which one is served better by less than this share of its work leave it at that: work
# rises and falls by chance, and a slice that changes hands loads for minutes.
_UNEVEN = 0.15


class Giving:
    """The slices of one quota on their way from models that have too many to those that lack them.

    `num_free` chips are there for whoever lacks slices first.
    """

    def __init__(
        self,
        quota: ChipQuota,
        members: Mapping[str, Member],
        asked: Mapping[str, SlicesAsked],
        shared: Shared,
        num_free: int,
    ) -> None:
        name = quota.compute_class
        self._num_free = num_free
        self._priority = {model: members[model].priority for model in asked}
        self._chips = {model: members[model].chips_of(name) for model in asked}
        self._pressing = {model: max(1, each.pressing) for model, each in asked.items()}
        weights = {
            model: {option.name: option.weight for option in each.ideal}
            for model, each in asked.items()
        }
        self._weight = {model: each[name] for model, each in weights.items()}
        # All slices of a model, whatever class they are of.
        self._has = {
            model: sum(weights[model].get(of, 1.0) * count for of, count in each.held.items())
            for model, each in asked.items()
        }
        held = {model: each.held.get(name, 0) for model, each in asked.items()}
        self._lacks = {model: shared.covering[model][name] - held[model] for model in asked}
        self._presses = {model: shared.pressing[model][name] - held[model] for model in asked}
        self._gives = {model: held[model] - shared.shares[model][name] for model in asked}

    def given_up(self) -> Counter[str]:
        """Returns the slices that go, by model."""
        going: Counter[str] = Counter()
        while takers := [model for model, count in self._lacks.items() if count > 0]:
            taker = min(takers, key=lambda model: (-self._priority[model], self._served(model, 1)))
            givers = self._givers_for(taker)
            if givers is None:
                self._lacks[taker] = 0
                continue
            going.update(givers)
            self._num_free -= self._chips[taker]
            self._has[taker] += self._weight[taker]
            self._lacks[taker] -= 1
            self._presses[taker] -= 1
        return going

    def _givers_for(self, taker: str) -> list[str] | None:
        """Takes the slices for one of `taker` from their models; `None` if there are too few."""
        givers: list[str] = []
        while self._num_free < self._chips[taker]:
            may_give = [model for model in self._gives if self._may_give(model, taker)]
            if not may_give:
                self._move(givers, -1)
                return None
            giver = min(may_give, key=lambda each: (self._priority[each], -self._served(each, -1)))
            self._move([giver], 1)
            givers.append(giver)
        return givers

    def _move(self, givers: Iterable[str], count: int) -> None:
        for model in givers:
            self._num_free += count * self._chips[model]
            self._gives[model] -= count
            self._has[model] -= count * self._weight[model]

    def _may_give(self, giver: str, taker: str) -> bool:
        if self._gives[giver] <= 0:
            return False
        mine, its = self._priority[giver], self._priority[taker]
        is_better = self._served(giver, -1) >= self._served(taker, 1)
        is_uneven = self._served(giver, 0) - self._served(taker, 0) >= _UNEVEN
        is_for_equals = self._presses[taker] > 0 and is_better and is_uneven
        return mine < its or (mine == its and is_for_equals)

    def _served(self, model: str, more: int) -> float:
        """How well the work that is there is served, with so many slices more."""
        return (self._has[model] + more * self._weight[model]) / self._pressing[model]
