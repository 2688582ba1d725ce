"""NVIDIA Dynamo's planner, scaling by throughput, for engines that do prefill and decode alike.

Source: github.com/ai-dynamo/dynamo, components/src/dynamo/planner, core/throughput_scaling.py,
core/load/predictors.py and config/defaults.py (read 2026-11-26). Every 180 s, with one GPU group
per replica:

    demand  = requests of the next interval, as predicted / its length
    desired = max(ceil(demand / best rate of one engine within the TTFT and ITL objectives), 1)

Parameters: their defaults, load-based scaling off. Of their predictors the Kalman filter over level
and trend, with its default noises; it takes the last value until it has seen five. The best rate is
that of the profile, at the lengths that were seen: an interpolation that is never wrong. The ITL
objective that the planner is told is a share of the real one, `objective_share`; 1 is theirs.
"""

import math
from collections.abc import Sequence

from autoscaling.records import ModelLoad, Observation, Plan
from autoscaling.simulator.baselines.layout import BaselineLayout
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile

ADJUSTMENT_INTERVAL_S = 180.0
LEVEL_NOISE = 1.0
TREND_NOISE = 0.1
MEASUREMENT_NOISE = 10.0
MIN_POINTS = 5


class KalmanTrend:
    """Filters a level and its trend from one measurement per interval."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._level = self._trend = 0.0
        # Variances of level and trend, and what they have in common.
        self._pll, self._plt, self._ptt = 1.0, 0.0, 1.0

    def next_after(self, measured: float) -> float:
        """Takes a measurement in and returns the one predicted to follow it; never negative."""
        self._num_seen += 1
        if self._num_seen == 1:
            self._level = measured
        else:
            self._update(measured)
        expected = self._level + self._trend
        return max(0.0, measured if self._num_seen < MIN_POINTS else expected)

    def _update(self, measured: float) -> None:
        level = self._level + self._trend
        pll = self._pll + 2 * self._plt + self._ptt + LEVEL_NOISE
        plt, ptt = self._plt + self._ptt, self._ptt + TREND_NOISE
        of_level, of_trend = pll / (pll + MEASUREMENT_NOISE), plt / (pll + MEASUREMENT_NOISE)
        surprise = measured - level
        self._level, self._trend = level + of_level * surprise, self._trend + of_trend * surprise
        self._pll, self._plt = (1 - of_level) * pll, (1 - of_level) * plt
        self._ptt = ptt - of_trend * plt


class DynamoPlanner:
    """Remembers the interval that is being counted, and what was decided after the last one."""

    name = "dynamo-planner"

    def __init__(
        self,
        layout: BaselineLayout,
        profile: CapacityProfile,
        objectives: Objectives,
        objective_share: float = 1.0,
    ) -> None:
        self._layout, self._profile = layout, profile
        self._itl_s = max(objective_share * objectives.tpot_s, 1.01 * profile.base_s)
        self._predictor = KalmanTrend()
        self._current: int | None = None
        self._began_s = -math.inf
        self._rates: list[float] = []

    def decide(self, observation: Observation) -> Plan:
        """The plan of the last interval, or of a new one when it is over."""
        now_s = observation.now_s
        if self._current is None:
            self._current, self._began_s = self._layout.held(observation.fleet), now_s
        if observation.load is not None:
            self._rates.append(observation.load.requests_per_s)
        is_over = now_s - self._began_s >= ADJUSTMENT_INTERVAL_S - 1e-6
        if observation.load is None or not is_over:
            return self._layout.plan(observation, self._current, "between two adjustments")
        self._began_s = now_s
        self._current, reason = self._desired(observation.load, self._rates)
        self._rates = []
        return self._layout.plan(observation, self._current, reason)

    def _desired(self, load: ModelLoad, rates: Sequence[float]) -> tuple[int, str]:
        counted = sum(rates) / len(rates) * ADJUSTMENT_INTERVAL_S
        demand = self._predictor.next_after(counted) / ADJUSTMENT_INTERVAL_S
        best = self._profile.max_requests_per_s(
            load.input_tokens_mean, load.output_tokens_mean, self._itl_s
        )
        wanted = math.ceil(demand / best) if best > 0 else self._layout.max_slices
        desired = min(max(wanted, self._layout.min_slices), self._layout.max_slices)
        return desired, f"{demand:.1f} requests/s predicted / {best:.2f} per slice: {desired}"
