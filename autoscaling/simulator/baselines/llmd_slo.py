"""Implements llm-d's SLO-aware autoscaling: saturation by predicted latency, and KEDA's formula.

Source: github.com/llm-d/llm-d, docs "SLO-Aware Autoscaling with KEDA - the control law" (read
2026-11-21). With s the smoothed signal, n provisioned replicas, r ready ones:

    raw = max(P90 TTFT / TTFT objective, P90 TPOT / TPOT objective), at most 2; 0 without traffic
    s   = mean of raw over 45 s, every 15 s
    d   = n + ceil(n * (s * c / 0.55 - 1))    if s > 0.55, with c = r / n while 0 < r < n, else 1
        = n - floor(n * (1 - s / 0.40))       if s < 0.40
        = n                                   otherwise

Then an HPA: up to the lowest d of 30 s, at most the larger of 100 % and 4 replicas per 60 s; down
to the highest d of 180 s, one replica per 120 s; the replicas that are there when it begins count
as its first d. (The credit never lowers d below n: the source
says that only an uncredited signal may.)

Parameters: llm-d trains a predictor of both latencies online and found ten points of attainment
between a cold one and a trained one. Here it is given the law that the engines obey, evaluated for
each slice with the requests that are on it: a predictor that is trained and never wrong. The 90th
percentile is taken over the slices.
"""

import math
from collections import deque
from typing import TypeVar

from autoscaling.records import ModelLoad, Observation, Plan
from autoscaling.simulator.baselines.layout import BaselineLayout, num_ready
from autoscaling.simulator.baselines.periods import begun_at_s
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.slice_lifecycle import SliceState

UP_THRESHOLD = 0.55
DOWN_THRESHOLD = 0.40
CLAMP = 2.0
QUANTILE = 0.9
RULE_PERIOD_S = 15.0
SMOOTHING_S = 45.0
UP_STABILISATION_S = 30.0
UP_PERIOD_S = 60.0
UP_PODS_PER_PERIOD = 4
DOWN_STABILISATION_S = 180.0
DOWN_PERIOD_S = 120.0


_T = TypeVar("_T")


class LlmdSlo:
    """Remembers the signal's and the formula's last minutes, as Prometheus and the HPA do."""

    name = "llmd-slo"

    def __init__(
        self,
        layout: BaselineLayout,
        profile: CapacityProfile,
        objectives: Objectives,
        up_threshold: float = UP_THRESHOLD,
    ) -> None:
        self._layout, self._up = layout, up_threshold
        # The band between the two thresholds keeps its proportions.
        self._down = up_threshold * DOWN_THRESHOLD / UP_THRESHOLD
        self._profile, self._objectives = profile, objectives
        self._begun = False
        self._current = layout.min_slices
        self._evaluated_at_s = self._raised_at_s = self._lowered_at_s = -math.inf
        self._raised_from = self._current
        self._raw: deque[tuple[float, float]] = deque()
        self._desired: deque[tuple[float, int]] = deque()

    def decide(self, observation: Observation) -> Plan:
        """The plan of the last evaluation, or of a new one when it is time."""
        now_s = observation.now_s
        if not self._begun:
            self._begun, self._current = True, self._layout.held(observation.fleet)
            self._desired.append((now_s, self._current))
        if observation.load is None or now_s - self._evaluated_at_s < RULE_PERIOD_S - 1e-6:
            return self._layout.plan(observation, self._current, "between two evaluations")
        self._evaluated_at_s = begun_at_s(self._evaluated_at_s, now_s, RULE_PERIOD_S)
        _remember(self._raw, now_s, self._saturation(observation, observation.load), SMOOTHING_S)
        signal = sum(each for _, each in self._raw) / len(self._raw)
        desired = self._formula(signal, num_ready(observation.fleet))
        desired = min(max(desired, self._layout.min_slices), self._layout.max_slices)
        _remember(self._desired, now_s, desired, DOWN_STABILISATION_S)
        self._scale(now_s)
        reason = f"saturation {signal:.2f}: {desired} desired, {self._current} after stabilisation"
        return self._layout.plan(observation, self._current, reason)

    def _formula(self, signal: float, ready: int) -> int:
        n = self._current
        if signal > self._up:
            credit = ready / n if 0 < ready < n else 1.0
            return n + max(0, math.ceil(n * (signal * credit / self._up - 1)))
        if signal < self._down:
            return n - math.floor(n * (1 - signal / self._down))
        return n

    def _scale(self, now_s: float) -> None:
        """The HPA's behaviour on the recommendations so far."""
        recent = [each for at_s, each in self._desired if at_s >= now_s - UP_STABILISATION_S]
        up, down = min(recent), max(each for _, each in self._desired)
        if up > self._current:
            if now_s - self._raised_at_s >= UP_PERIOD_S:
                self._raised_at_s, self._raised_from = now_s, self._current
            most = self._raised_from + max(self._raised_from, UP_PODS_PER_PERIOD)
            self._current = max(self._current, min(up, most))
        elif down < self._current and now_s - self._lowered_at_s >= DOWN_PERIOD_S:
            self._lowered_at_s = now_s
            self._current -= 1

    def _saturation(self, observation: Observation, load: ModelLoad) -> float:
        on_slices = sorted(
            each.num_in_flight
            for each in observation.fleet.slices
            if each.state == SliceState.READY
        )
        if not on_slices:
            return CLAMP if load.num_waiting else 0.0
        if load.requests_per_s <= 0 and load.num_in_flight == 0:
            return 0.0
        fullest = on_slices[math.ceil(QUANTILE * len(on_slices)) - 1]
        return min(CLAMP, self._predicted(load, fullest, len(on_slices)))

    def _predicted(self, load: ModelLoad, in_flight: int, ready: int) -> float:
        """The worse of both latencies over its objective, on a slice with `in_flight` requests."""
        profile, rate = self._profile, load.requests_per_s / ready
        running = min(in_flight, profile.max_num_seqs)
        prompts = rate * load.input_tokens_mean * profile.per_prompt_token_s
        if prompts >= 1:
            return CLAMP
        step_s = (profile.base_s + running * profile.per_sequence_s) / (1 - prompts)
        limit = profile.max_requests_per_s(
            load.input_tokens_mean, load.output_tokens_mean, self._objectives.tpot_s
        )
        # Who finds every sequence taken waits until that many have left.
        queue_s = (in_flight - running) / limit if limit > 0 else math.inf
        prompt_s = load.input_tokens_mean * profile.per_prompt_token_s
        ttft_s = profile.ttft_floor_s + prompt_s + step_s + queue_s + load.oldest_wait_s
        allowed_s = self._objectives.ttft_of(load.input_tokens_mean)
        return max(ttft_s / allowed_s, step_s / self._objectives.tpot_s)


def _remember(history: deque[tuple[float, _T]], now_s: float, value: _T, window_s: float) -> None:
    history.append((now_s, value))
    while history[0][0] < now_s - window_s:
        history.popleft()
