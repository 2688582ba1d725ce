"""Defines quotas of chips, what models ask of them, and what each gets. Pure data."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaling.policy.mix.portfolio import ClassOption
from autoscaling.records import SliceView
from serving.domain.slice_lifecycle import WAITING, SliceState


@dataclass(frozen=True, slots=True)
class ChipQuota:
    """The chips of `compute_class` that the slices of all `models` together may have.

    A class has one quota at most for each model.
    """

    compute_class: str
    max_chips: int
    models: frozenset[str]


@dataclass(frozen=True, slots=True)
class Member:
    """A model that shares quotas. Among those that lack slices a higher `priority` goes first.

    `num_chips` is how many chips one of its slices has; those of a class in `chips_by_class` are of
    another shape.
    """

    model: str
    num_chips: int
    priority: int = 0
    chips_by_class: Mapping[str, int] = field(default_factory=dict)

    def chips_of(self, compute_class: str) -> int:
        """Returns the chips of one slice of a class."""
        return self.chips_by_class.get(compute_class, self.num_chips)


@dataclass(frozen=True, slots=True)
class SlicesAsked:
    """What a model asks for at a decision, as if nobody shared anything with it.

    `pressing` slices are for the interactive and standard work that comes now, `need` for what
    waits and is foreseen as well, of which `floor` are left when a group is lost; `whole` are those
    and the ones for batches that are due. All four are in slices of the model's own shape.
    `reliable` is what can be relied on of each class, `ideal` is what there is if every class
    delivers. `held` are slices by class that have chips and stay, `leaving` are those that drain.
    All classes together have `max_slices` at most.
    """

    pressing: int
    need: int
    whole: int
    floor: float
    reliable: Sequence[ClassOption]
    ideal: Sequence[ClassOption]
    held: Mapping[str, int]
    leaving: Mapping[str, int]
    max_slices: float = math.inf


@dataclass(frozen=True, slots=True)
class ChipShare:
    """What one model may have of the classes that have a quota; a class without one is not named.

    `most` are slices in all, now. `given_up` are those that go at once, because another model lacks
    them and is to have them. In a class of `full` no chip is left for one more slice: its orders
    wait for other models, and not for the market. `words` say what the model has to go without.
    """

    most: Mapping[str, int] = field(default_factory=dict)
    given_up: Mapping[str, int] = field(default_factory=dict)
    full: frozenset[str] = frozenset()
    words: str = ""


NOTHING_SHARED = ChipShare()


def chips_of(slices: Iterable[SliceView]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Returns the slices of a model that have chips and stay, and those that leave, by class.

    Of a replica that waits, machines may be there already.
    """
    held: Counter[str] = Counter()
    leaving: Counter[str] = Counter()
    for each in slices:
        if each.state == SliceState.DRAINING:
            leaving[each.compute_class] += 1
        elif each.state not in WAITING or each.coming_since_s is not None:
            held[each.compute_class] += 1
    return held, leaving
