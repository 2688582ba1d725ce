"""Holds a fixed number of on-demand slices all the time: enough for the busiest minute of the day.

Formula: n = ceil(max over minutes of the work offered / what a slice carries within the TPOT
objective), divided by the share of its limit that a slice is aimed at (`sizing.HEADROOM`). It is
the generous version, because it knows the busiest minute beforehand.
"""

import math
from collections.abc import Sequence

from autoscaling.records import Observation, Plan
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from autoscaling.simulator.baselines.sizing import HEADROOM
from autoscaling.simulator.offered import Offered
from serving.domain.compute_class import ComputeClass


class StaticOnDemand:
    """Plans the same number of slices every time."""

    name = "static-on-demand"

    def __init__(
        self, terms: Sequence[ComputeClass], offered: Offered, headroom: float = HEADROOM
    ) -> None:
        self._layout = SingleClassLayout.of(terms)
        wanted = math.ceil(float(offered.slices.max(initial=0.0)) / headroom - 1e-9)
        self._wanted = min(max(wanted, self._layout.min_slices), self._layout.max_slices)

    def decide(self, observation: Observation) -> Plan:
        """The plan for the slices of the busiest minute."""
        return self._layout.plan(
            observation, self._wanted, f"{self._wanted} slices carry the busiest minute"
        )
