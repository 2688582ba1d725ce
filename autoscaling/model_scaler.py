"""Scales one model by the policy: reports become an observation, the plan becomes targets.

Owns what lies between reports and the policy: bounds of the deployments, a hold where something is
not known, and what is reported of a plan. What is known of slices is `SlicesWatch`'s. Holds no rule
of scaling of its own: that is `SlicewisePolicy`. Clockless: callers pass wall-clock seconds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoscaling.observations import GatewayWatch, Report, ReportMissingError, load_of
from autoscaling.policy.classes.unseen_orders import unseen_words
from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.chip_book import ChipBook
from autoscaling.policy.quotas.records import (
    NOTHING_SHARED,
    ChipQuota,
    ChipShare,
    Member,
    SlicesAsked,
)
from autoscaling.policy.rules import Rules
from autoscaling.policy_config import ModelSettings
from autoscaling.records import Decision, ModelLoad, Observation, Plan
from autoscaling.slices_watch import LATE_SHARE, SlicesWatch
from serving.domain.capacity.engine_rates import rates_of_stats
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import load_of_stats
from serving.domain.plan_report import ModelPlan, PlanChange
from serving.domain.supply.orders import ordered_targets, pinned_targets

# Below Serve's own, whose lines the controller keeps in its log file.
logger = logging.getLogger("ray.serve.slicewise")

# A gateway that begins tells its load within seconds. Until then others' is the model's.
_BEGINS_WITHIN_S = 10.0


class DecisionSink(Protocol):
    """Keeps decisions; `autoscaling.replay.DecisionLog` is one."""

    def begin(
        self,
        model: str,
        profile: CapacityProfile,
        terms: tuple[ComputeClass, ...],
        rules: Rules,
        memory: PolicyRecord | None,
        profiles: Mapping[str, CapacityProfile],
    ) -> None:
        """Records that a policy of this model starts with that memory; `None`: an empty one.

        `profiles` are of the classes with other slices than `profile` is of.
        """
        ...

    def decided(self, model: str, observation: Observation, share: ChipShare, plan: Plan) -> None:
        """Records one decision, taken with that share of what models have together."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """The current target of one deployment in Serve, and its bounds."""

    target: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ServeState:
    """The state that Serve knows at `now_s`. `deployments` are the model's, by compute class.

    `gateways` are those that run, with what each reported last; `None` before its first report.
    `shares_chips` says that other models may have to give slices up for this one.
    """

    now_s: float
    gateways: Mapping[str, Report | None]
    directory: tuple[Report, ...]
    deployments: Mapping[str, Bounds]
    shares_chips: bool = False


class ModelScaler:
    """Decides for one model again and again. A failure changes nothing: the last targets stand."""

    def __init__(self, settings: ModelSettings, sink: DecisionSink) -> None:
        self._settings = settings
        self._memory: PolicyRecord | None = None  # of a policy before this one
        self._sink = sink
        self._policy: SlicewisePolicy | None = None
        self._policy_made_s = 0.0
        self._watch = GatewayWatch(settings.model)
        self._fleet = SlicesWatch(settings.model, settings.rules.max_load_age_s)
        self._terms: dict[str, ComputeClass] = {}
        self._targets: dict[str, int] = {}
        self._drain_order: tuple[str, ...] = ()
        self._changes: tuple[PlanChange, ...] = ()
        self._changed_at_s: float | None = None
        # Between `ask` and `plan`.
        self._observation: Observation | None = None
        self._unknown: tuple[str, ...] = ()
        self._misfits: list[str] = []
        self._failed_plan: Plan | None = None
        self._num_failures = 0
        self._reported_failures: set[str] = set()
        self._reported_alerts: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._settings.model

    @property
    def compute_classes(self) -> tuple[str, ...]:
        """The classes whose terms it has."""
        return tuple(each.name for each in self._settings.terms)

    @property
    def targets(self) -> Mapping[str, int]:
        """The last targets, by compute class; a class without one keeps what Serve has."""
        return self._targets

    def recall(self, memory: PolicyRecord) -> None:
        """Begins again with what a policy of this model learned before."""
        self._memory, self._policy = memory, None

    def to_record(self, now_s: float) -> PolicyRecord | None:
        """Returns what the policy has learned until now; `None` before its first decision."""
        try:
            if self._policy is None:
                return None
            record = self._policy.to_record(now_s)
            # It is of the model, whichever classes have a deployment now.
            known = {} if self._memory is None else self._memory.classes
            ours = {each.name for each in self._settings.terms}
            classes = {name: each for name, each in known.items() if name in ours}
            changes = {
                "slice_shape": self._settings.slice_shape,
                "classes": classes | dict(record.classes),
            }
            return record.model_copy(update=changes)
        except ValueError as error:  # it learned what cannot be: a record of it would be refused
            logger.warning("policy_memory_unfit model=%s reason=%r", self.model, str(error))
            return None

    def decide(self, serve_state: ServeState) -> ModelPlan:
        """The next plan of a model that shares no quota; see `plan`."""
        self.ask(serve_state)
        return self.plan(serve_state, NOTHING_SHARED)

    def ask(self, serve_state: ServeState) -> SlicesAsked | None:
        """Observes; returns what quotas are asked for, `None` if the last plan stands.

        `plan` comes next.
        """
        self._failed_plan = None
        try:
            policy, self._misfits = self._policy_for(serve_state.deployments, serve_state.now_s)
            self._observation, self._unknown = self._observe(serve_state)
            return policy.ask(self._observation)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not scale down
            self._failed_plan = self._failed(serve_state, error)
            return None

    def fixed(self, serve_state: ServeState, asked: SlicesAsked | None) -> Mapping[str, int]:
        """Returns the slices by class that no quota decides about, after `ask`.

        They are those that an operator has pinned, and all if nothing was `asked`.
        """
        present = {name: bounds.target for name, bounds in serve_state.deployments.items()}
        standing = {} if asked is not None else present | dict(self._targets)
        if self._fleet.report is None:
            return standing
        bounds = {name: (each.least, each.most) for name, each in serve_state.deployments.items()}
        return standing | pinned_targets(self.model, present, bounds, self._fleet.report.pins)

    def plan(self, serve_state: ServeState, share: ChipShare) -> ModelPlan:
        """The next plan, as it is shown. Its targets are `targets` from now on.

        `share` is what the model may have of what it shares.
        """
        plan = self._failed_plan
        if plan is None:
            try:
                plan = self._held(self._plan(share), serve_state, share)
            except Exception as error:  # noqa: BLE001 - as in `ask`
                plan = self._failed(serve_state, error)
        plan = self._ordered(plan, serve_state)
        # A plan that stands has no order of its own, and an operator may pin fewer all the same.
        self._drain_order = plan.drain_order or self._drain_order
        self._log_alerts(plan.alerts)
        self._apply(plan, serve_state)
        return ModelPlan(
            model=self.model,
            decided_at_s=plan.at_s,
            changed_at_s=self._changed_at_s,
            targets=dict(plan.targets),
            demand_slices=plan.demand_slices,
            next_slice_at_s=plan.next_slice_at_s,
            arithmetic=plan.arithmetic,
            changes=self._changes,
            refusals=_shown(plan.refusals),
            alerts=plan.alerts,
            num_failures=self._num_failures,
            drain_order=self._drain_order,
        )

    def _plan(self, share: ChipShare) -> Plan:
        assert self._policy is not None  # `ask` comes first
        assert self._observation is not None
        plan = self._policy.plan(share)
        self._sink.decided(self.model, self._observation, share, plan)
        if self._observation.load is None:  # these messages are clearer than the policy's own
            plan = replace(plan, alerts=self._unknown)
        unseen = unseen_words(plan.at_s, self._fleet.unseen)
        return replace(plan, alerts=(*plan.alerts, *unseen, *self._misfits))

    def _policy_for(
        self, deployments: Mapping[str, Bounds], now_s: float
    ) -> tuple[SlicewisePolicy, list[str]]:
        """Returns the policy within the deployments' bounds, and alerts of what does not fit.

        Other bounds make another policy, with the memory of the one before.
        """
        terms = {
            each.name: _within(each, deployments[each.name])
            for each in self._settings.terms
            if each.name in deployments
        }
        known = {each.name for each in self._settings.terms}
        alerts = [
            f"{self.model} has no deployment that scales on {name}; it is not planned for"
            for name in sorted(known - set(deployments))
        ]
        alerts += [
            f"{each.name} may have {each.min_slices} to {each.max_slices} slices by the policy and "
            f"{deployments[each.name].least} to {deployments[each.name].most} by its deployment, "
            f"which counts"
            for each in self._settings.terms
            if each.name in terms and _contradicts(each, deployments[each.name])
        ]
        if self._policy is None or terms != self._terms:
            settings, memory = self._settings, self.to_record(now_s) or self._memory
            classes = tuple(terms.values())
            profiles = {
                name: each for name, each in settings.profiles.items() if name in deployments
            }
            made_from = (settings.profile, classes, settings.rules, memory, profiles)
            self._policy, self._policy_made_s = SlicewisePolicy(*made_from), now_s
            self._terms, self._memory = terms, memory
            self._sink.begin(self.model, *made_from)
        return self._policy, alerts

    def _observe(self, serve_state: ServeState) -> tuple[Observation, tuple[str, ...]]:
        """Returns what the policy observes, and what is unknown. Unknown slices are as before."""
        now_s, gateways = serve_state.now_s, serve_state.gateways
        unknown: list[str] = []
        load: ModelLoad | None = None
        heard_s = self._watch.look(now_s, gateways)
        max_age_s = self._settings.rules.max_load_age_s
        try:
            load = load_of(
                self.model,
                self._begun(now_s, gateways, heard_s),
                heard_s,
                now_s,
                max_age_s,
                self._settings.assumed,
            )
        except ReportMissingError as error:
            unknown.append(str(error))
        told = {
            name: rates_of_stats(self.model, report.stats)
            for name, report in gateways.items()
            if report is not None and now_s - heard_s[name] <= LATE_SHARE * max_age_s
        }
        seen = self._fleet.look(
            now_s,
            serve_state.directory,
            {name: serve_state.deployments[name].target for name in self._terms},
            self._terms,
            told,
            self._drain_order,
            shares_chips=serve_state.shares_chips,
        )
        if seen.unknown:
            unknown.append(seen.unknown)
        # Without the slices no plan could be made from it.
        load = None if seen.are_too_old else load
        return Observation(now_s, load, seen.fleet), tuple(unknown)

    def _begun(
        self, now_s: float, gateways: Mapping[str, Report | None], heard_s: Mapping[str, float]
    ) -> Mapping[str, Report | None]:
        """Returns the gateways without those that have just begun, as long as others tell a load.

        Each would be silent at first, and hold slices for as long as a decline has to last.
        """
        silent = {
            name
            for name, report in gateways.items()
            if report is None or load_of_stats(self.model, report.stats) is None
        }
        if len(silent) == len(gateways):
            return gateways
        new = {name for name in silent if now_s - heard_s[name] < _BEGINS_WITHIN_S}
        return {name: report for name, report in gateways.items() if name not in new}

    def _held(self, plan: Plan, serve_state: ServeState, share: ChipShare) -> Plan:
        """Returns the plan of a policy that has just begun: for a while it takes nothing away.

        It does not know what was needed before, and would withdraw orders that are long in a queue.
        What another model is to have goes all the same.
        """
        now_s = serve_state.now_s
        self._policy_made_s = min(self._policy_made_s, now_s)  # the clock may have been set back
        left_s = self._policy_made_s + self._settings.rules.drain_delay_s - now_s
        if left_s <= 0 or plan.demand_slices is None:
            return plan
        targets = dict(plan.targets)
        for name, bounds in serve_state.deployments.items():
            if name in targets and not share.given_up.get(name, 0):
                most = min(bounds.most, share.most.get(name, bounds.most))
                targets[name] = max(targets[name], min(bounds.target, most))
        if targets == plan.targets:
            return plan
        words = f"this policy has just begun, and none goes for {left_s:.0f} s more"
        return replace(plan, targets=targets, arithmetic=f"{plan.arithmetic}; {words}")

    def _ordered(self, plan: Plan, serve_state: ServeState) -> Plan:
        """Returns the plan as operators have it; what the directory told last stands."""
        if self._fleet.report is None:
            return plan
        deployments = serve_state.deployments
        targets, notes = ordered_targets(
            self.model,
            plan.targets,
            {name: bounds.target for name, bounds in deployments.items()},
            {name: (bounds.least, bounds.most) for name, bounds in deployments.items()},
            is_frozen=self._fleet.report.is_frozen,
            pins=self._fleet.report.pins,
        )
        return replace(plan, targets=targets, alerts=(*plan.alerts, *notes)) if notes else plan

    def _failed(self, serve_state: ServeState, error: Exception) -> Plan:
        """Returns a plan of the last targets; logs the traceback once per type of `error`."""
        self._num_failures += 1
        kind = f"{type(error).__name__}: {error}"
        if type(error).__name__ not in self._reported_failures:
            self._reported_failures.add(type(error).__name__)
            logger.error("policy_failed model=%s", self.model, exc_info=error)
        return Plan(
            at_s=serve_state.now_s,
            targets=self._targets
            or {name: bounds.target for name, bounds in serve_state.deployments.items()},
            arithmetic="the policy failed: the last plan stands",
            alerts=(f"the policy failed ({kind}); the last plan stands",),
        )

    def _apply(self, plan: Plan, serve_state: ServeState) -> None:
        """Makes the plan's targets ours, and reports a change in one line."""
        before = {
            name: self._targets.get(name, bounds.target)
            for name, bounds in serve_state.deployments.items()
        }
        self._targets = dict(plan.targets)
        if all(before.get(name) == target for name, target in plan.targets.items()):
            return
        self._changes = _shown(plan.decisions)
        self._changed_at_s = plan.at_s
        logger.info(
            "plan_changed model=%s targets=%s changes=%r refused=%r because=%r",
            self.model,
            ",".join(f"{name}:{count}" for name, count in sorted(plan.targets.items())),
            "; ".join(_describe(each) for each in plan.decisions),
            "; ".join(_describe(each) for each in plan.refusals),
            plan.arithmetic,
        )

    def _log_alerts(self, alerts: tuple[str, ...]) -> None:
        # Ages change from one alert to the next; their number and kind do not.
        kinds = tuple(alert.split(" is ")[0] for alert in alerts)
        if kinds != self._reported_alerts:
            self._reported_alerts = kinds
            if alerts:
                logger.warning("plan_alert model=%s alerts=%r", self.model, "; ".join(alerts))


def decide_together(
    scalers: Sequence[ModelScaler],
    states: Mapping[str, ServeState],
    quotas: Sequence[ChipQuota],
    members: Sequence[Member],
) -> tuple[ModelPlan, ...]:
    """The next plans of all models, in the order of `scalers`; `states` are by model.

    Each model asks, then the quotas are shared, then each plans in turn. A model that is no member
    shares nothing.
    """
    asked = {each.model: each.ask(states[each.model]) for each in scalers}
    fixed = {each.model: each.fixed(states[each.model], asked[each.model]) for each in scalers}
    book = ChipBook(quotas, members, asked, fixed)
    by_model = {each.model: each for each in scalers}
    plans = {}
    for model, share in book.in_turn(by_model):
        plans[model] = by_model[model].plan(states[model], share)
        book.take(model, by_model[model].targets)
    return tuple(plans[each.model] for each in scalers)


def _within(terms: ComputeClass, bounds: Bounds) -> ComputeClass:
    """Returns a class within the bounds of its deployment, which are Serve's and come first."""
    most = max(min(terms.max_slices, bounds.most), bounds.least)
    least = min(max(terms.min_slices, bounds.least), most)
    return replace(terms, min_slices=least, max_slices=most)


def _contradicts(terms: ComputeClass, bounds: Bounds) -> bool:
    return terms.min_slices > bounds.most or terms.max_slices < bounds.least


def _shown(decisions: tuple[Decision, ...]) -> tuple[PlanChange, ...]:
    return tuple(
        PlanChange(compute_class=each.compute_class, delta=each.delta, reason=each.reason)
        for each in decisions
    )


def _describe(each: Decision) -> str:
    return f"{each.compute_class or 'all'} {each.delta:+d}: {each.reason}"
