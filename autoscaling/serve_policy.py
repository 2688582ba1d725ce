"""The policy as Ray Serve calls it: bound in serve_config.yaml, run inside Serve's controller.

    autoscaling_policy:
      policy_function: autoscaling.serve_policy:SlicePolicy
      policy_kwargs: ...   # autoscaling.policy_config.PolicyConfig

Owns the controller's side: which deployment is which, when to decide, and the thread that writes
logs and plans, because Serve calls about ten times a second from its one loop. Decides nothing.

Serve pickles this class with its module's globals; that is why there is little here.
"""

import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from autoscaling.model_scaler import Bounds, ModelScaler, ServeState, decide_together
from autoscaling.observations import Report, latest_reports
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy_config import PolicyConfigError, read_policy_settings
from autoscaling.storage.decision_writer import DecisionWriter
from autoscaling.storage.plan_store import PlanStore
from autoscaling.storage.recall import MemoryReader
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
        self._store = PlanStore()
        self._writer = DecisionWriter(executor, self._store.write_report, self._store.write_memory)
        self._memories = MemoryReader((), executor, self._store.read_memory)
        self._unfit: set[str] = set()
        try:
            read = read_policy_settings(settings)
        except PolicyConfigError as error:
            logger.error("policy_settings_refused reason=%r", str(error))
            self._alerts = (f"the policy's settings cannot be used: {error}",)
            return
        self._decide_every_s = read.decide_every_s
        self._quotas, self._members = read.quotas, read.members
        self._writer.open_log(read.decision_log)
        self._memories = MemoryReader(read.models, executor, self._store.read_memory)
        self._scalers = tuple(ModelScaler(each, self._writer) for each in read.models)

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
        self._store.application = next((each.app_name for each in contexts), "")
        self._recall(now_s)
        reports = self._reports(contexts, ids, GATEWAY)
        running = contexts[ids[GATEWAY]].running_replicas if GATEWAY in ids else ()
        gateways = {each.unique_id: reports.get(each) for each in running}
        directory = tuple(self._reports(contexts, ids, DIRECTORY).values())
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
        self._remember(now_s)

    def _recall(self, now_s: float) -> None:
        """Gives scalers what was learned before, once it could be read."""
        if self._memories.is_done:
            return
        known = self._memories.poll(now_s)
        for scaler in self._scalers:
            if scaler.model in known:
                scaler.recall(known[scaler.model])

    def _remember(self, now_s: float) -> None:
        """Has written what was learned, now and then; not over what could not be read."""
        if self._remember_at_s - _REMEMBER_EVERY_S <= now_s < self._remember_at_s:
            return
        self._remember_at_s = now_s + _REMEMBER_EVERY_S
        if self._memories.is_done:
            for scaler in self._scalers:
                if (record := scaler.to_record(now_s)) is not None:
                    self._writer.remember(scaler.model, record)

    def _reports(self, contexts: _Contexts, ids: Mapping[str, Any], name: str) -> dict[Any, Report]:
        """Returns the last report of each replica of a deployment, by Serve's `ReplicaID`.

        What cannot be is left out, so that its gateway counts as silent: policies would learn it.
        """
        if name not in ids:
            return {}
        reports: dict[Any, Report] = {}
        for replica, report in latest_reports(contexts[ids[name]].raw_metrics or {}).items():
            fit = {what: value for what, value in report.stats.items() if _can_be(what, value)}
            reports[replica] = Report(report.at_s, fit)
            unfit = set(report.stats) - set(fit) - self._unfit
            self._unfit |= unfit
            for what in sorted(unfit):
                logger.error("report_unfit deployment=%s what=%s", name, what)
        return reports


def _can_be(what: str, value: float) -> bool:
    """Whether a number may be told; Serve carries any. An order of as many as there are is -1."""
    return math.isfinite(value) and (value >= 0 or what.startswith("order|"))


def _bounds(context: Any) -> Bounds:
    return Bounds(
        target=context.target_num_replicas,
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
