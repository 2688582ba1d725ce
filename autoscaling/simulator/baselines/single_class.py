"""Chooses the slices of a policy without compute classes: prepaid first, then on demand. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.records import Decision, Fleet, Observation, Plan
from serving.domain.compute_class import ComputeClass


@dataclass(frozen=True, slots=True)
class SingleClassLayout:
    """The classes of such a policy. Prepaid ones are kept whole: they are paid for anyway.

    Every baseline may use the prepaid classes.
    """

    prepaid: tuple[ComputeClass, ...]
    on_demand: ComputeClass
    others: tuple[str, ...]

    @classmethod
    def of(cls, terms: Sequence[ComputeClass]) -> "SingleClassLayout":
        """The layout over a scenario's classes.

        Raises:
            ValueError: none of them can be had at any time and kept for ever.
        """
        lasting = [
            each
            for each in terms
            if not each.is_prepaid and not each.is_revocable and each.max_run_s is None
        ]
        if not lasting:
            names = ", ".join(each.name for each in terms)
            raise ValueError(f"classes are {names}; one must be neither revocable nor limited")
        on_demand = min(lasting, key=lambda each: each.price)
        prepaid = tuple(each for each in terms if each.is_prepaid)
        used = {on_demand.name, *(each.name for each in prepaid)}
        return cls(prepaid, on_demand, tuple(e.name for e in terms if e.name not in used))

    @property
    def min_slices(self) -> int:
        """The fewest slices that a baseline may want; one, where nothing else is asked for."""
        return max(1, self.num_prepaid + self.on_demand.min_slices)

    @property
    def max_slices(self) -> int:
        """The most slices that a baseline may want."""
        return self.num_prepaid + self.on_demand.max_slices

    @property
    def num_prepaid(self) -> int:
        """The number of prepaid slices, which are held at any demand."""
        return sum(each.max_slices for each in self.prepaid)

    def held(self, fleet: Fleet) -> int:
        """Returns the prepaid slices and those on demand, within the bounds."""
        there = self.num_prepaid + fleet.targets.get(self.on_demand.name, 0)
        return min(max(there, self.min_slices), self.max_slices)

    def plan(self, observation: Observation, wanted: int, reason: str) -> Plan:
        """The plan for `wanted` slices in all, which lies within the bounds."""
        name = self.on_demand.name
        targets = dict.fromkeys(self.others, 0) | {
            each.name: each.max_slices for each in self.prepaid
        }
        targets[name] = wanted - self.num_prepaid
        delta = targets[name] - observation.fleet.targets.get(name, 0)
        decisions = (Decision(name, delta, reason),) if delta else ()
        return Plan(observation.now_s, targets, decisions, arithmetic=reason)
