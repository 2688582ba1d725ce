"""Decides what slower classes are asked for now: what is needed by the time at which they deliver.

The base is the portfolio for the need when the soonest class delivers. What is needed only after
that can still be asked of the soonest class later; of a slower one it has to be asked now. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autoscaling.policy.mix.portfolio import Portfolio, num_within


@dataclass(frozen=True, slots=True)
class Horizon:
    """The `need` of slices in all by when a class delivers, and the portfolio that meets it then.

    `lead_s` is how long the class takes from now.
    """

    compute_class: str
    lead_s: float
    need: int
    portfolio: Portfolio


@dataclass(frozen=True, slots=True)
class AskedAhead:
    """So many slices more than in the base, because `need` are needed in `lead_s`."""

    count: int
    need: int
    lead_s: float

    @property
    def words(self) -> str:
        """The reason, for a decision."""
        return f"{self.count} of its slices for the need of {self.need} in {self.lead_s:.0f} s"


def asked_ahead(
    base: Portfolio, later: Sequence[Horizon], weights: Mapping[str, float] = MappingProxyType({})
) -> Mapping[str, AskedAhead]:
    """Returns what each class of `later` is asked for beyond `base`; the soonest comes first.

    A class is asked for its part of the portfolio of its own time. Portfolios of two times may
    differ in more than their size, so all together carry no more than the largest of them.
    `weights` are what a slice of each class carries; 1 where it is not named.
    """
    planned = dict(base.slices)
    ahead: dict[str, AskedAhead] = {}
    for each in sorted(later, key=lambda each: each.lead_s):
        slices = each.portfolio.slices
        weight = weights.get(each.compute_class, 1.0)
        room = _carried(slices, weights) - _carried(planned, weights)
        count = min(
            slices[each.compute_class] - planned[each.compute_class],
            num_within(room, weight),
        )
        if count > 0:
            planned[each.compute_class] += count
            ahead[each.compute_class] = AskedAhead(count, each.need, each.lead_s)
    return ahead


def _carried(slices: Mapping[str, int], weights: Mapping[str, float]) -> float:
    return sum(count * weights.get(name, 1.0) for name, count in slices.items())


def ahead_words(ahead: Mapping[str, AskedAhead]) -> str:
    """What is asked ahead, for the arithmetic of a plan; empty where nothing is."""
    return "".join(f"; {name}: {each.words}" for name, each in sorted(ahead.items()))
