"""Defines how a baseline's number of slices becomes targets per compute class.

A baseline decides one number. Where those slices are bought is its layout: on demand only
(`single_class`), or on a ladder of classes as GKE has it (`ladder`).
"""

from typing import Protocol

from autoscaling.records import Fleet, Observation, Plan
from serving.domain.slice_lifecycle import SliceState


class BaselineLayout(Protocol):
    """The classes of a baseline. It may remember what it has asked of which class."""

    @property
    def min_slices(self) -> int:
        """The fewest slices that the baseline may want."""
        ...

    @property
    def max_slices(self) -> int:
        """The most slices that the baseline may want."""
        ...

    def held(self, fleet: Fleet) -> int:
        """Returns how many slices of the fleet are the baseline's, within its bounds."""
        ...

    def plan(self, observation: Observation, wanted: int, reason: str) -> Plan:
        """The plan for `wanted` slices in all, which lies within the bounds."""
        ...


def num_ready(fleet: Fleet) -> int:
    """Returns how many slices take requests now."""
    return sum(1 for each in fleet.slices if each.state == SliceState.READY)
