"""The Kubernetes Horizontal Pod Autoscaler (autoscaling/v2) on requests in flight per replica.

Source: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, "Algorithm details",
"Default behavior" and "Stabilization window". With an external metric as an average value:

    ratio   = total / (target * current)
    desired = current                  if |ratio - 1| <= 0.1 (the tolerance)
            = ceil(total / target)     otherwise

every 15 s. Up: at once, at most the larger of 100 % and 4 replicas more per 15 s. Down: to the
highest recommendation of the last 300 s, at most 100 % per 15 s.

Parameters: the target is the number of requests that `sizing` finds on a slice that carries its
share; the metric counts requests on engines and those that wait.
"""

import math
from collections import deque
from collections.abc import Sequence

from autoscaling.records import Observation, Plan
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from autoscaling.simulator.baselines.sizing import Sizing
from serving.domain.compute_class import ComputeClass

TOLERANCE = 0.1
SYNC_PERIOD_S = 15.0
DOWN_STABILISATION_S = 300.0
UP_PODS_PER_PERIOD = 4


class HorizontalPodAutoscaler:
    """Remembers its recommendations for as long as the stabilisation window is."""

    name = "hpa"

    def __init__(self, terms: Sequence[ComputeClass], sizing: Sizing) -> None:
        self._layout = SingleClassLayout.of(terms)
        self._target = sizing.in_flight
        self._current = self._layout.min_slices
        self._synced_at_s = -math.inf
        self._recommended: deque[tuple[float, int]] = deque()

    def decide(self, observation: Observation) -> Plan:
        """The plan of the last sync period, or of a new one when it is time."""
        load, now_s = observation.load, observation.now_s
        if load is None or now_s - self._synced_at_s < SYNC_PERIOD_S - 1e-6:
            return self._layout.plan(observation, self._current, "between two syncs")
        self._synced_at_s = now_s
        total = load.num_in_flight + load.num_waiting
        recommended = self._recommendation(total)
        self._current = self._stabilised(recommended, now_s)
        reason = (
            f"{total} requests / {self._target:.1f} per slice: {recommended} recommended, "
            f"{self._current} after stabilisation"
        )
        return self._layout.plan(observation, self._current, reason)

    def _recommendation(self, total: int) -> int:
        ratio = total / (self._target * self._current)
        wanted = self._current if abs(ratio - 1) <= TOLERANCE else math.ceil(total / self._target)
        return min(max(wanted, self._layout.min_slices), self._layout.max_slices)

    def _stabilised(self, recommended: int, now_s: float) -> int:
        self._recommended.append((now_s, recommended))
        while self._recommended[0][0] < now_s - DOWN_STABILISATION_S:
            self._recommended.popleft()
        if recommended > self._current:
            return min(recommended, self._current + max(self._current, UP_PODS_PER_PERIOD))
        return min(self._current, max(wanted for _, wanted in self._recommended))
