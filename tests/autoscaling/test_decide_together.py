"""Models that share a quota, as Serve's controller has them: asked together, planned in turn."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_model_scaler import RULES, Sink

from autoscaling.model_scaler import Bounds, ModelScaler, ServeState, decide_together
from autoscaling.observations import Report, Tokens
from autoscaling.policy.quotas.records import NOTHING_SHARED, ChipQuota, ChipShare, Member
from autoscaling.policy.rules import Rules
from autoscaling.policy_config import ModelSettings
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import LoadSample, directory_stats, load_stats
from serving.domain.plan_report import ModelPlan
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.orders import NO_ORDERS, OperatorOrder, OrderKind, StandingOrders
from tests.autoscaling.policy.policy_world import PROFILE

TERMS = (ComputeClass("reserved", 0.0, is_prepaid=True, max_slices=8),)
QUOTA = ChipQuota("reserved", 32, frozenset({"chat", "code"}))


@dataclass
class Controller:
    """Two models over 32 chips, four to a slice, ten requests per second to a slice."""

    chat_priority: int = 0
    rules: Rules = RULES
    now_s: float = 10_000.0
    orders: StandingOrders = NO_ORDERS
    code_waits_s: float = 0.0

    def __post_init__(self) -> None:
        self.members = (Member("code", 4), Member("chat", 4, self.chat_priority))
        self.sinks = {each.model: Sink() for each in self.members}
        self.targets = dict.fromkeys(self.sinks, 0)
        self.scalers = [
            ModelScaler(
                ModelSettings(model, PROFILE, self.rules, TERMS, Tokens(100.0, 100.0)), sink
            )
            for model, sink in self.sinks.items()
        ]

    def step(self, held: dict[str, int], **rates: float | None) -> dict[str, ModelPlan]:
        """A decision; with a rate of `None` nobody knows the load of a model."""
        self.now_s += 10.0
        life = SliceLifecycle.begin(self.now_s).enter(SliceState.RESERVED, self.now_s, "held")
        records = tuple(
            SliceRecord(f"{model}-{place}", model, "reserved", life)
            for model, count in held.items()
            for place in range(count)
        )
        told = directory_stats(Snapshot("v", records, ()), 0.0, self.now_s, self.orders)
        states = {
            model: ServeState(
                self.now_s,
                {} if rate is None else {"g": self._load(model, rate)},
                (Report(self.now_s, told),),
                {"reserved": Bounds(self.targets[model], 0, 8)},
            )
            for model, rate in rates.items()
        }
        plans = decide_together(self.scalers, states, [QUOTA], self.members)
        assert [each.model for each in plans] == [each.model for each in self.scalers]
        self.targets = {each.model: each.targets["reserved"] for each in plans}
        return {each.model: each for each in plans}

    def _load(self, model: str, rate: float) -> Report:
        wait_s = self.code_waits_s if model == "code" else 0.0
        sample = LoadSample(rate, 50 if wait_s else 0, wait_s, 0, None, None)
        return Report(self.now_s, load_stats(model, sample))


def test_quota_bounds_what_models_are_given_together() -> None:
    controller = Controller()
    controller.step({}, chat=58.0, code=58.0)
    assert controller.targets == {"chat": 4, "code": 4}
    shares = controller.sinks["chat"].shares
    assert shares == [ChipShare({"reserved": 4}, words=shares[0].words)]


def test_who_comes_first_is_planned_first() -> None:
    controller = Controller(chat_priority=1)
    controller.step({}, chat=58.0, code=58.0)
    assert controller.targets == {"chat": 6, "code": 2}


def test_what_is_given_up_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(chat_priority=1)
    controller.step({}, chat=0.0, code=78.0)
    assert controller.targets == {"chat": 0, "code": 8}
    with caplog.at_level(logging.INFO, "ray.serve.slicewise"):
        plans = controller.step({"code": 8}, chat=18.0, code=78.0)
    assert controller.targets["code"] < 8
    (change,) = plans["code"].changes
    assert change.reason.startswith("given up at once: another model lacks it and comes first")
    assert "of the 32 chips of reserved" in plans["chat"].arithmetic


def test_priority_counts_also_against_work_that_is_late_and_nothing_else_does() -> None:
    controller = Controller(chat_priority=1, code_waits_s=10.0)
    controller.step({"code": 6}, chat=None, code=48.0)
    assert controller.targets["code"] == 6
    for _ in range(10):
        controller.step({"code": 6}, chat=0.0, code=8.0)
        assert controller.targets["code"] == 6
    controller.step({"code": 6}, chat=58.0, code=8.0)
    assert controller.targets == {"chat": 6, "code": 2}


def test_model_of_which_nothing_is_known_keeps_what_it_has() -> None:
    controller = Controller(chat_priority=1)
    controller.step({}, chat=None, code=48.0)
    controller.step({"code": 5}, chat=78.0, code=None)
    assert controller.targets == {"chat": 3, "code": 5}
    assert controller.sinks["code"].shares[-1] == NOTHING_SHARED


def test_model_whose_policy_fails_keeps_what_it_has() -> None:
    controller = Controller(chat_priority=1)
    controller.step({}, chat=None, code=48.0)
    code = next(each for each in controller.scalers if each.model == "code")
    rules = replace(RULES, objectives=replace(RULES.objectives, tpot_s=0.01))  # none is that fast
    code._settings = replace(code._settings, rules=rules)
    code._policy = None
    plans = controller.step({"code": 5}, chat=78.0, code=48.0)
    assert controller.targets == {"chat": 3, "code": 5}
    assert plans["code"].num_failures == 1


def test_pinned_slices_are_taken_from_the_quota_first() -> None:
    def pin(**of: Any) -> StandingOrders:
        order = OperatorOrder(OrderKind.PIN, "ada", "a drill", 0.0, "reserved", **of)
        return NO_ORDERS.given(order)

    controller = Controller(chat_priority=1, orders=pin(model="code", num_replicas=6))
    controller.step({}, chat=78.0, code=0.0)
    assert controller.targets == {"chat": 2, "code": 6}
    controller = Controller(chat_priority=1, orders=pin(model="chat", num_replicas=1))
    controller.step({}, chat=78.0, code=78.0)
    assert controller.targets == {"chat": 1, "code": 7}
