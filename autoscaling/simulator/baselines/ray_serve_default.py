"""Runs Ray Serve's default autoscaling: `ray.serve.autoscaling_policy` as it is installed.

Serve's controller wraps the default policy in its scaling factors, its delays and its bounds. The
wrapper reads the wall clock, so its parts are called one by one here, with simulated time:

    desired = running * ongoing / (target_ongoing_requests * running)

applied up after 30 s and down after 600 s of the same direction, Serve's defaults.

Parameters: `target_ongoing_requests` is the number of requests that `sizing` finds on a slice that
carries its share; ongoing requests are averaged over Serve's default look-back period, 30 s.
The replicas that are there when it begins are its first target.
Importing this module imports Ray, which takes seconds.
"""

from collections import deque
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from autoscaling.records import Observation, Plan
from autoscaling.simulator.baselines.layout import BaselineLayout, num_ready
from autoscaling.simulator.baselines.sizing import Sizing


class RayServeDefault:
    """Keeps what Serve's controller keeps of one deployment between two of its rounds."""

    name = "ray-serve-default"

    def __init__(self, layout: BaselineLayout, sizing: Sizing) -> None:
        self._layout = layout
        self._config = AutoscalingConfig(
            min_replicas=self._layout.min_slices,
            max_replicas=self._layout.max_slices,
            target_ongoing_requests=sizing.in_flight,
        )
        self._begun = False
        self._target = layout.min_slices
        # What Serve's function hands back to be given again; its form is Serve's own.
        self._state: dict[str, Any] = {}
        self._ongoing: deque[tuple[float, int]] = deque()

    def decide(self, observation: Observation) -> Plan:
        """The plan of Serve's function; the last one where there is no load to show it."""
        now_s, load = observation.now_s, observation.load
        if not self._begun:
            self._begun, self._target = True, self._layout.held(observation.fleet)
        if load is None:
            return self._layout.plan(observation, self._target, "no load is known")
        self._ongoing.append((now_s, load.num_in_flight + load.num_waiting))
        while self._ongoing[0][0] <= now_s - self._config.look_back_period_s:
            self._ongoing.popleft()
        ongoing = sum(each for _, each in self._ongoing) / len(self._ongoing)
        running = num_ready(observation.fleet)
        wanted = self._decided(self._context(ongoing, running, now_s))
        self._target = min(max(wanted, self._layout.min_slices), self._layout.max_slices)
        reason = f"{ongoing:.1f} ongoing requests on {running} replicas: {self._target} slices"
        return self._layout.plan(observation, self._target, reason)

    def _decided(self, context: AutoscalingContext) -> int:
        """Does what Serve's wrapper around the default policy does, with the time of `context`."""
        desired, _ = replica_queue_length_autoscaling_policy(context)
        if context.current_num_replicas == 0:
            # A cold start, or nothing to do: Serve takes neither through its delays.
            return int(desired)
        scaled = _apply_scaling_factors(desired, context.current_num_replicas, self._config)
        wanted, self._state = _apply_delay_logic(
            max(0, scaled),
            context.target_num_replicas,
            self._config,
            self._state,
            _now=context.current_time,
        )
        return int(wanted)

    def _context(self, ongoing: float, running: int, now_s: float) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=DeploymentID(name="simulated"),
            deployment_name="simulated",
            app_name="simulated",
            current_num_replicas=running,
            target_num_replicas=self._target,
            running_replicas=[],
            total_num_requests=ongoing,
            total_queued_requests=0.0,
            aggregated_metrics=None,
            raw_metrics=None,
            capacity_adjusted_min_replicas=self._layout.min_slices,
            capacity_adjusted_max_replicas=self._layout.max_slices,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=self._config,
        )
