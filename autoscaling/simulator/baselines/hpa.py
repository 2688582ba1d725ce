"""The Kubernetes Horizontal Pod Autoscaler (autoscaling/v2) on requests in flight per replica.

Source: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, "Algorithm details",
"Default behavior" and "Stabilization window". With an external metric as an average value:

    ratio   = total / (target * current)
    desired = current                  if |ratio - 1| <= 0.1 (the tolerance)
            = ceil(total / target)     otherwise

every 15 s. Up: at once, at most the larger of 100 % and 4 replicas more per 15 s. Down: to the
highest recommendation of the last 300 s, at most 100 % per 15 s. The replicas that are there when
it begins count as its first recommendation.

Parameters: the target is the number of requests that `sizing` finds on a slice that carries its
share; the metric counts requests on engines and those that wait.
"""

import math
from collections import deque

from autoscaling.records import Observation, Plan
from autoscaling.simulator.baselines.layout import BaselineLayout
from autoscaling.simulator.baselines.periods import begun_at_s
from autoscaling.simulator.baselines.sizing import Sizing

TOLERANCE = 0.1
SYNC_PERIOD_S = 15.0
DOWN_STABILISATION_S = 300.0
UP_PODS_PER_PERIOD = 4


class HorizontalPodAutoscaler:
    """Remembers its recommendations for as long as the stabilisation window is."""

    name = "hpa"

    def __init__(self, layout: BaselineLayout, sizing: Sizing) -> None:
        self._layout = layout
        self._target = sizing.in_flight
        self._current: int | None = None
        self._synced_at_s = -math.inf
        self._recommended: deque[tuple[float, int]] = deque()

    def decide(self, observation: Observation) -> Plan:
        """The plan of the last sync period, or of a new one when it is time."""
        load, now_s = observation.load, observation.now_s
        if self._current is None:
            self._current = self._layout.held(observation.fleet)
            self._recommended.append((now_s, self._current))
        if load is None or now_s - self._synced_at_s < SYNC_PERIOD_S - 1e-6:
            return self._layout.plan(observation, self._current, "between two syncs")
        self._synced_at_s = begun_at_s(self._synced_at_s, now_s, SYNC_PERIOD_S)
        total = load.num_in_flight + load.num_waiting
        recommended = self._recommendation(total, self._current)
        self._current = self._stabilised(recommended, self._current, now_s)
        reason = (
            f"{total} requests / {self._target:.1f} per slice: {recommended} recommended, "
            f"{self._current} after stabilisation"
        )
        return self._layout.plan(observation, self._current, reason)

    def _recommendation(self, total: int, current: int) -> int:
        ratio = total / (self._target * current)
        wanted = current if abs(ratio - 1) <= TOLERANCE else math.ceil(total / self._target)
        return min(max(wanted, self._layout.min_slices), self._layout.max_slices)

    def _stabilised(self, recommended: int, current: int, now_s: float) -> int:
        self._recommended.append((now_s, recommended))
        while self._recommended[0][0] < now_s - DOWN_STABILISATION_S:
            self._recommended.popleft()
        if recommended > current:
            return min(recommended, current + max(current, UP_PODS_PER_PERIOD))
        return min(current, max(wanted for _, wanted in self._recommended))
