"""Decides what slower classes are asked for now: what is needed by the time at which they deliver.

The base is the portfolio for the need when the soonest class delivers. What is needed only after
that can still be asked of the soonest class later; of a slower one it has to be asked now. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaling.policy.portfolio import Portfolio


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


def asked_ahead(base: Portfolio, later: Sequence[Horizon]) -> Mapping[str, AskedAhead]:
    """Returns what each class of `later` is asked for beyond `base`; the soonest comes first.

    A class is asked for its part of the portfolio of its own time. Portfolios of two times may
    differ in more than their size, so all together are no more than the largest of them.
    """
    planned = dict(base.slices)
    ahead: dict[str, AskedAhead] = {}
    for each in sorted(later, key=lambda each: each.lead_s):
        slices = each.portfolio.slices
        room = sum(slices.values()) - sum(planned.values())
        count = min(slices[each.compute_class] - planned[each.compute_class], room)
        if count > 0:
            planned[each.compute_class] += count
            ahead[each.compute_class] = AskedAhead(count, each.need, each.lead_s)
    return ahead


def ahead_words(ahead: Mapping[str, AskedAhead]) -> str:
    """What is asked ahead, for the arithmetic of a plan; empty where nothing is."""
    return "".join(f"; {name}: {each.words}" for name, each in sorted(ahead.items()))
