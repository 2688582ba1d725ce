"""The policy as Ray Serve calls it: bound in serve_config.yaml, run inside Serve's controller.

    autoscaling_policy:
      policy_function: autoscaling.serve_policy:SlicePolicy
      policy_kwargs: ...   # autoscaling.policy_config.PolicyConfig

Owns the controller's side: which deployment is which, when to decide, and the thread that writes
logs and plans, because Serve calls about ten times a second from its one loop. Decides nothing.

Serve pickles this class with its module's globals; that is why there is little here.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from autoscaling.model_scaler import Bounds, ModelScaler, ServeState, decide_together
from autoscaling.observations import Report, latest_reports
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy_config import PolicyConfigError, read_policy_settings
from autoscaling.storage.decision_writer import DecisionWriter
from autoscaling.storage.plan_store import recall_memories, write_plan_report, write_policy_memory
from serving.domain.names.deployment_names import DIRECTORY, GATEWAY, engine_deployment_name
from serving.domain.plan_report import PlanReport

logger = logging.getLogger("ray.serve.slicewise")

# What a restart may lose of what was learned.
_REMEMBER_EVERY_S = 60.0
# Serve's `DeploymentID` and `AutoscalingContext`; Ray ships no types for either.
_Contexts = Mapping[Any, Any]


class SlicePolicy:
    """Adapts the policy to Serve, which makes one and calls it again and again.

    No failure in it scales anything down. Settings that cannot be used raise nothing here: Serve
    would then fall back on its own policy, which takes every deployment to its minimum.
    """

    def __init__(self, **settings: object) -> None:
        self._due_at_s = 0.0
        self._scalers: tuple[ModelScaler, ...] = ()
        self._quotas: tuple[ChipQuota, ...] = ()
        self._members: tuple[Member, ...] = ()
        self._alerts: tuple[str, ...] = ()
        self._decide_every_s = 5.0
        # Not at once: what could not be read may be there to be read by the next policy.
        self._remember_at_s = time.time() + _REMEMBER_EVERY_S
        executor = ThreadPoolExecutor(1, "slicewise-plans")
        self._writer = DecisionWriter(executor, write_plan_report, write_policy_memory)
        try:
            read = read_policy_settings(settings)
        except PolicyConfigError as error:
            logger.error("policy_settings_refused reason=%r", str(error))
            self._alerts = (f"the policy's settings cannot be used: {error}",)
            return
        self._decide_every_s = read.decide_every_s
        self._quotas, self._members = read.quotas, read.members
        self._writer.open_log(read.decision_log)
        known = recall_memories(read.models, time.time(), executor)
        self._scalers = tuple(
            ModelScaler(each, self._writer, known.get(each.model)) for each in read.models
        )

    @staticmethod
    def complaints(settings: Mapping[str, object]) -> tuple[str, ...]:
        """Returns why settings cannot be used; `config check` asks before anything is deployed."""
        try:
            read_policy_settings(settings)
        except PolicyConfigError as error:
            return error.problems
        return ()

    def __call__(self, contexts: _Contexts) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Returns targets by deployment; a deployment without one keeps what it has."""
        now_s = time.time()
        ids = {each.name: each for each in contexts}
        # The wall clock may have been set back.
        if not self._due_at_s - self._decide_every_s <= now_s < self._due_at_s:
            self._due_at_s = now_s + self._decide_every_s
            try:
                self._decide(contexts, ids, now_s)
            except Exception:  # the controller's other work must go on, at the last targets
                logger.exception("policy_adapter_failed")
        targets = {}
        for scaler in self._scalers:
            for compute_class, target in scaler.targets.items():
                deployment = ids.get(engine_deployment_name(scaler.model, compute_class))
                if deployment is not None:
                    targets[deployment] = target
        return targets, {}

    def __del__(self) -> None:
        """Closes the writer once Serve has dropped this policy for another one."""
        self._writer.close()

    def _decide(self, contexts: _Contexts, ids: Mapping[str, Any], now_s: float) -> None:
        reports = _reports(contexts, ids, GATEWAY)
        running = contexts[ids[GATEWAY]].running_replicas if GATEWAY in ids else ()
        gateways = {each.unique_id: reports.get(each) for each in running}
        directory = tuple(_reports(contexts, ids, DIRECTORY).values())
        unclaimed = set(ids) - {GATEWAY, DIRECTORY}
        states = {}
        for scaler in self._scalers:
            deployments = {
                name: _bounds(contexts[ids[deployment]])
                for name in scaler.compute_classes
                if (deployment := engine_deployment_name(scaler.model, name)) in ids
            }
            unclaimed -= {engine_deployment_name(scaler.model, name) for name in deployments}
            shares = any(each.model == scaler.model for each in self._members)
            states[scaler.model] = ServeState(now_s, gateways, directory, deployments, shares)
        plans = decide_together(self._scalers, states, self._quotas, self._members)
        held = tuple(
            f"{name} scales, but policy_kwargs has no model and class for it; its target is held"
            for name in sorted(unclaimed)
        )
        alerts = (*self._alerts, *self._writer.alerts, *held)
        self._writer.publish(PlanReport(written_at_s=now_s, models=plans, alerts=alerts))
        if not self._remember_at_s - _REMEMBER_EVERY_S <= now_s < self._remember_at_s:
            self._remember_at_s = now_s + _REMEMBER_EVERY_S
            for scaler in self._scalers:
                if (record := scaler.to_record(now_s)) is not None:
                    self._writer.remember(scaler.model, record)


def _reports(contexts: _Contexts, ids: Mapping[str, Any], name: str) -> dict[Any, Report]:
    """Returns the last report of each replica of a deployment, by Serve's `ReplicaID`."""
    if name not in ids:
        return {}
    return latest_reports(contexts[ids[name]].raw_metrics or {})


def _bounds(context: Any) -> Bounds:
    return Bounds(
        target=context.target_num_replicas,
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
