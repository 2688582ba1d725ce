"""One model under the policy: what is unknown holds, what fails holds, what changes is told."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from autoscaling.model_scaler import Bounds, ModelScaler, ServeState
from autoscaling.observations import Report, Tokens
from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.quotas.records import ChipShare
from autoscaling.policy.rules import Rules
from autoscaling.policy_config import ModelSettings
from autoscaling.records import Observation, Plan
from serving.domain.capacity.engine_rates import EngineRate, rate_stats
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import LoadSample, directory_stats, load_stats
from serving.domain.plan_report import ModelPlan
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.orders import NO_ORDERS, OperatorOrder, OrderKind, StandingOrders
from tests.autoscaling.policy.policy_world import PROFILE
from tests.supply_builders import hosts_of, life

TERMS = (
    ComputeClass("reserved", 0.0, is_prepaid=True, max_slices=2),
    ComputeClass("spot", 4.0, is_revocable=True, max_slices=50),
)
RULES = Rules(
    Objectives(3.0, 0.05), tpot_margin=1.0, spread=0.0, floor_ratio=0.0, drain_delay_s=0.0, idle_s=0
)
NOW_S = 10_000.0
EMPTY = {"reserved": Bounds(0, 0, 2), "spot": Bounds(0, 0, 50)}


@dataclass
class Sink:
    """Keeps what is written."""

    begun: list[tuple[ComputeClass, ...]] = field(default_factory=list)
    memories: list[PolicyRecord | None] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    shares: list[ChipShare] = field(default_factory=list)
    profiles: list[Mapping[str, CapacityProfile]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def begin(
        self,
        model: str,
        profile: CapacityProfile,
        terms: tuple[ComputeClass, ...],
        rules: Rules,
        memory: PolicyRecord | None,
        profiles: Mapping[str, CapacityProfile],
    ) -> None:
        self.profiles.append(profiles)
        self.begun.append(terms)
        self.memories.append(memory)

    def decided(self, model: str, observation: Observation, share: ChipShare, plan: Plan) -> None:
        self.shares.append(share)
        self.observations.append(observation)
        self.plans.append(plan)


@dataclass
class Stage:
    """A model, and what Serve says of it."""

    rules: Rules = RULES
    now_s: float = NOW_S
    sink: Sink = field(default_factory=Sink)
    records: tuple[SliceRecord, ...] = ()
    ended: tuple[SliceRecord, ...] = ()
    orders: StandingOrders = NO_ORDERS

    def __post_init__(self) -> None:
        settings = ModelSettings("m", PROFILE, self.rules, TERMS, Tokens(100.0, 100.0))
        self.scaler = ModelScaler(settings, self.sink)

    def step(self, rate: float = 0.0, **changes: Any) -> ModelPlan:
        """A decision ten seconds on, with everything reported, save `changes`."""
        self.now_s += 10.0
        return self.scaler.decide(self.serve_state(rate, **changes))

    def serve_state(self, rate: float = 0.0, **changes: Any) -> ServeState:
        sample = LoadSample(rate, 0, 0.0, 0, None, None)
        snapshot = Snapshot("v", self.records, self.ended)
        stats = directory_stats(snapshot, 0.0, self.now_s, self.orders)
        fields: dict[str, Any] = {
            "now_s": self.now_s,
            "gateways": {"g": Report(self.now_s, load_stats("m", sample))},
            "directory": (Report(self.now_s, stats),),
            "deployments": EMPTY,
        }
        return ServeState(**(fields | changes))


def ready(**counts: int) -> tuple[SliceRecord, ...]:
    """Replicas that serve, so many of each class."""
    serving = SliceLifecycle.begin(NOW_S - 60)
    for state in (SliceState.RESERVED, SliceState.LOADING, SliceState.READY):
        serving = serving.enter(state, NOW_S - 30, "it serves")
    return tuple(
        SliceRecord(f"{name}-{number}", "m", name, serving)
        for name, count in counts.items()
        for number in range(count)
    )


def lost(name: str, at_s: float) -> SliceRecord:
    life = SliceLifecycle.begin(at_s - 60).enter(SliceState.RESERVED, at_s - 30, "held")
    return SliceRecord(name, "m", "spot", life.end(EndCause.PREEMPTED, at_s, "taken away"))


def test_load_becomes_targets_by_class_with_reasons() -> None:
    stage = Stage()
    plan = stage.step(45.0)
    assert stage.scaler.targets == plan.targets == {"reserved": 2, "spot": 3}
    assert {change.compute_class: change.delta for change in plan.changes} == {
        "reserved": 2,
        "spot": 3,
    }
    assert all(change.reason for change in plan.changes)
    assert (plan.decided_at_s, plan.changed_at_s, plan.alerts) == (stage.now_s, stage.now_s, ())


def test_nothing_falls_while_scaling_down_is_frozen_also_when_the_directory_is_silent() -> None:
    frozen = NO_ORDERS.given(OperatorOrder(OrderKind.FREEZE, "ada", "a drill", 0.0))
    stage = Stage(orders=frozen)
    many = {"reserved": Bounds(2, 0, 2), "spot": Bounds(8, 0, 50)}
    plan = stage.step(45.0, deployments=many)
    assert plan.targets == {"reserved": 2, "spot": 8}
    assert any("scaling down is frozen: spot stays at 8" in alert for alert in plan.alerts)
    assert stage.step(deployments=many, directory=()).targets == {"reserved": 2, "spot": 8}
    stage.orders = NO_ORDERS
    assert stage.step(45.0, deployments=many).targets["spot"] < 8
    # More is bought all the same.
    stage.orders = frozen
    assert stage.step(450.0, deployments=many).targets["spot"] > 8


def test_pinned_class_stays_where_it_is_whatever_the_load_is() -> None:
    pin = OperatorOrder(OrderKind.PIN, "ada", "a drill", 0.0, "spot", model="m", num_replicas=1)
    stage = Stage(orders=NO_ORDERS.given(pin))
    plan = stage.step(45.0)
    assert (plan.targets["spot"], stage.scaler.targets["spot"]) == (1, 1)
    assert any("spot is pinned at 1; the policy would have 3" in alert for alert in plan.alerts)


def test_plan_says_which_slices_go_first_by_the_requests_that_engines_have() -> None:
    stage = Stage()
    stage.records = tuple(
        replace(life(name, hosts_of(name), state, model="m"), engine_id=f"engine-{name}")
        for name, state in (
            ("busy", SliceState.READY),
            ("idle", SliceState.READY),
            ("calm", SliceState.READY),
            ("loads", SliceState.LOADING),
        )
    )
    rates = [
        EngineRate(f"engine-{name}", "spot", 0.0, 100.0 * number, 0.01)
        for name, number in (("busy", 20.0), ("calm", 5.0))
    ]
    told = load_stats("m", LoadSample(45.0, 0, 0.0, 0, None, None)) | rate_stats("m", rates)
    plan = stage.step(gateways={"g": Report(stage.now_s + 10.0, told)})
    assert plan.drain_order == ("loads", "idle", "calm", "busy")


def test_last_change_is_shown_until_the_next() -> None:
    stage = Stage()
    first = stage.step(45.0)
    same = {"reserved": Bounds(2, 0, 2), "spot": Bounds(3, 0, 50)}
    later = stage.step(45.0, deployments=same)
    assert (later.changes, later.changed_at_s) == (first.changes, first.changed_at_s)
    assert later.decided_at_s == first.decided_at_s + 10.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gateways": {}}, "no gateway runs"),
        ({"gateways": {"h": None}}, "gateway h is silent: it has told no load of m"),
        ({"gateways": {"h": Report(NOW_S - 100, load_stats("m", LoadSample(0, 0, 0, 0, 1, 1)))}},
         "gateway h is left out: it has told no load for 120 s; allowed: 60 s"),
    ],
)  # fmt: skip
def test_what_is_missing_or_stale_holds_the_targets_and_is_an_alert(
    changes: dict[str, Any], reason: str
) -> None:
    stage = Stage()
    stage.step(45.0)
    have = {"reserved": Bounds(2, 0, 2), "spot": Bounds(3, 0, 50)}
    plan = stage.step(deployments=have, **changes)
    assert plan.targets == {"reserved": 2, "spot": 3}
    assert plan.alerts[0].startswith(reason)
    assert plan.demand_slices is None
    assert stage.sink.observations[-1].load is None


SILENT: dict[str, Any] = {"directory": ()}


def deployed(targets: Mapping[str, int]) -> dict[str, Bounds]:
    return {name: replace(EMPTY[name], target=target) for name, target in targets.items()}


def test_silent_directory_lets_the_need_rise_once_and_nothing_fall() -> None:
    stage = Stage()
    stage.records = tuple(life(name, hosts_of(name), model="m") for name in "abc")
    before = stage.step(25.0).targets
    grown = stage.step(60.0, deployments=deployed(before), **SILENT)
    assert grown.targets["spot"] > before["spot"]
    assert grown.alerts == (
        "the directory tells no slices: slices are taken to be as they were, and none is given up",
    )
    # What was asked for is not asked for twice, though nobody sees that it comes.
    for _ in range(3):
        plan = stage.step(60.0, deployments=deployed(grown.targets), **SILENT)
        assert plan.targets == grown.targets
    for _ in range(10):
        plan = stage.step(5.0, deployments=deployed(grown.targets), **SILENT)
        assert plan.targets == grown.targets
    assert any(
        each.reason.startswith("none goes while the directory tells no slices")
        for each in plan.refusals
    )
    plan = stage.step(5.0, deployments=deployed(grown.targets))
    assert plan.targets["spot"] < grown.targets["spot"]
    assert plan.alerts == ()


def test_silent_directory_lets_no_order_be_withdrawn() -> None:
    stage = Stage()
    stage.records = tuple(life(name, hosts_of(name), model="m") for name in "abc")
    stage.step(25.0)
    ordered = {"reserved": 2, "spot": 6}
    plan = stage.step(25.0, deployments=deployed(ordered), **SILENT)
    assert plan.targets == ordered
    assert any(
        each.compute_class == "spot" and each.reason.startswith("kept: the directory tells no")
        for each in plan.refusals
    )
    assert stage.step(25.0, deployments=deployed(ordered)).targets["spot"] < 6


def test_order_does_not_become_late_while_nobody_sees_whether_it_waits() -> None:
    stage = Stage()
    waits = life("r-1", model="m", at_s=NOW_S)
    stage.records = (waits,)
    patience_s = 1.5 * TERMS[1].provisioning_s
    have = deployed({"reserved": 2, "spot": 1})
    stage.step(25.0, deployments=have)
    while stage.now_s < NOW_S + patience_s + 60.0:
        plan = stage.step(25.0, deployments=have, **SILENT)
    assert not any("backing off" in each.reason for each in plan.refusals)
    assert any("late" in each.reason for each in stage.step(25.0, deployments=have).refusals)


def test_slices_that_nobody_has_seen_for_minutes_hold_the_targets_both_ways() -> None:
    stage = Stage()
    have = stage.step(25.0).targets
    while stage.now_s < NOW_S + 310.0:
        plan = stage.step(25.0, deployments=deployed(have), **SILENT)
        assert plan.targets == have
    assert plan.demand_slices is not None
    plan = stage.step(90.0, deployments=deployed(have), **SILENT)
    assert (plan.targets, plan.demand_slices) == (have, None)
    assert plan.alerts == ("the directory tells no slices",)


def test_slices_are_not_planned_with_for_longer_after_the_clock_was_set_back() -> None:
    stage = Stage()
    have = stage.step(25.0).targets
    stage.now_s -= 3600.0
    for _ in range(32):
        plan = stage.step(25.0, deployments=deployed(have), **SILENT)
    plan = stage.step(90.0, deployments=deployed(have), **SILENT)
    assert (plan.targets, plan.demand_slices) == (have, None)


@pytest.mark.parametrize("changes", [{"shares_chips": True}, {}])
def test_slices_that_were_never_known_or_share_chips_hold_the_targets(
    changes: dict[str, Any],
) -> None:
    stage = Stage()
    have = {"reserved": 1, "spot": 0}
    if changes:
        stage.step(5.0, deployments=deployed(have))
    plan = stage.step(90.0, deployments=deployed(have), **SILENT, **changes)
    assert (plan.targets, plan.demand_slices) == (have, None)
    assert plan.alerts == ("the directory tells no slices",)
    assert sum(stage.step(90.0, deployments=deployed(have)).targets.values()) > 1


def test_directory_that_restarted_has_lost_no_slice() -> None:
    stage = Stage()
    life = SliceLifecycle.begin(NOW_S).enter(SliceState.RESERVED, NOW_S, "held")
    stage.records = (SliceRecord("r-1", "m", "spot", life),)
    have = deployed({"reserved": 0, "spot": 1})
    stage.step(5.0, deployments=have)
    fresh = directory_stats(Snapshot("v"), stage.now_s + 9.0, stage.now_s + 10.0)
    plan = stage.step(5.0, deployments=have, directory=(Report(stage.now_s + 10.0, fresh),))
    assert "has just started" in plan.alerts[0]
    observed = stage.sink.observations[-1].fleet
    assert [each.slice_id for each in observed.slices] == ["r-1"]
    assert observed.losses == ()


def test_policy_that_fails_scales_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(rules=Rules(Objectives(3.0, 0.01)))  # no slice is that fast
    have = {"reserved": Bounds(2, 0, 2), "spot": Bounds(3, 0, 50)}
    with caplog.at_level(logging.INFO, "ray.serve.slicewise"):
        plans = [stage.step(5.0, deployments=have) for _ in range(3)]
    assert [plan.targets for plan in plans] == [{"reserved": 2, "spot": 3}] * 3
    assert [plan.num_failures for plan in plans] == [1, 2, 3]
    assert "the policy failed (UnreachableObjectiveError: tpot_s is 0.01" in plans[-1].alerts[0]
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert told[0].exc_info is not None


def test_failure_later_keeps_the_last_plan_not_what_serve_has() -> None:
    stage = Stage()
    stage.step(45.0)
    plan = stage.step(deployments={"reserved": Bounds(0, -1, -1), "spot": Bounds(0, 0, 50)})
    assert plan.num_failures == 1
    assert stage.scaler.targets == {"reserved": 2, "spot": 3}


def test_loss_is_told_once_and_none_of_before_our_time() -> None:
    stage = Stage()
    stage.ended = (lost("r-0", NOW_S - 20),)
    stage.step(5.0)
    stage.ended += (lost("r-1", NOW_S + 5),)
    stage.step(5.0)
    stage.step(5.0)
    losses = [[each.slice_id for each in seen.fleet.losses] for seen in stage.sink.observations]
    assert losses == [[], ["r-1"], []]


def test_deployments_bound_their_classes_and_other_bounds_begin_anew() -> None:
    stage = Stage()
    narrow = EMPTY | {"spot": Bounds(0, 1, 2)}
    plan = stage.step(500.0, deployments=narrow)
    assert plan.targets == {"reserved": 2, "spot": 2}
    stage.step(500.0)
    bounds = [{each.name: (each.min_slices, each.max_slices) for each in terms}
              for terms in stage.sink.begun]  # fmt: skip
    assert bounds == [
        {"reserved": (0, 2), "spot": (1, 2)},
        {"reserved": (0, 2), "spot": (0, 50)},
    ]
    # What was learned within the old bounds counts within the new ones.
    first, second = stage.sink.memories
    assert first is None
    assert second is not None
    assert second.forecast.rates == (500.0,)


def test_bounds_that_contradict_those_of_a_deployment_stop_no_scaling() -> None:
    terms = (TERMS[0], replace(TERMS[1], min_slices=3))
    scaler = ModelScaler(ModelSettings("m", PROFILE, RULES, terms, Tokens(100.0, 100.0)), Sink())
    narrow = EMPTY | {"spot": Bounds(0, 0, 2)}
    plan = scaler.decide(Stage().serve_state(500.0, deployments=narrow))
    assert plan.targets == {"reserved": 2, "spot": 2}
    assert plan.alerts == (
        "spot may have 3 to 50 slices by the policy and 0 to 2 by its deployment, which counts",
    )


def test_order_that_serve_does_not_start_is_late_and_another_class_is_asked() -> None:
    """It gives a deployment up whose replicas fail, or Ray has no room for their actors."""
    terms = (TERMS[1], ComputeClass("on-demand", 10.0, max_slices=50))
    scaler = ModelScaler(ModelSettings("m", PROFILE, RULES, terms, Tokens(100.0, 100.0)), Sink())
    stage = Stage()
    targets = {"spot": 0, "on-demand": 0}
    plans = []
    for _ in range(60):
        stage.now_s += 10.0
        bounds = {name: Bounds(target, 0, 50) for name, target in targets.items()}
        plans.append(scaler.decide(stage.serve_state(45.0, deployments=bounds)))
        targets = dict(plans[-1].targets)
    first, last = plans[0], plans[-1]
    assert first.targets == {"spot": 5, "on-demand": 0}
    assert first.alerts == ()
    assert last.targets == {"spot": 5, "on-demand": 5}
    assert any("starts too few replicas of spot" in alert for alert in last.alerts)
    # Once its replicas tell of themselves they are late by their own time.
    stage.records = tuple(
        SliceRecord(f"s{number}", "m", "spot", SliceLifecycle.begin(stage.now_s))
        for number in range(5)
    )
    stage.now_s += 10.0
    bounds = {name: Bounds(target, 0, 50) for name, target in targets.items()}
    plan = scaler.decide(stage.serve_state(45.0, deployments=bounds))
    assert not any("replicas of spot" in alert for alert in plan.alerts)


def test_class_without_a_deployment_is_not_planned_for() -> None:
    stage = Stage()
    plan = stage.step(45.0, deployments={"reserved": Bounds(0, 0, 2)})
    assert plan.targets == {"reserved": 2}
    assert plan.alerts == ("m has no deployment that scales on spot; it is not planned for",)


def test_change_is_one_line_in_the_log_and_a_hold_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    have = {"reserved": Bounds(2, 0, 2), "spot": Bounds(3, 0, 50)}
    with caplog.at_level(logging.INFO, "ray.serve.slicewise"):
        stage.step(45.0)
        stage.records = ready(reserved=2, spot=3)
        for _ in range(3):
            stage.step(45.0, deployments=have)
        for _ in range(3):
            stage.step(deployments=have, gateways={})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("plan_changed model=m targets=reserved:2,spot:3 changes='")
    assert lines[1].startswith("plan_alert model=m alerts='no gateway runs")


def told(rate: float, at_s: float) -> Report:
    return Report(at_s, load_stats("m", LoadSample(rate, 0, 0.0, 0, 100.0, 100.0)))


def test_late_gateway_lets_the_need_rise_and_not_fall() -> None:
    stage = Stage(rules=replace(RULES, forecast_share=0.0), records=ready(reserved=2, spot=7))
    many = {"reserved": Bounds(2, 0, 2), "spot": Bounds(7, 0, 50)}
    last = told(45.0, stage.now_s + 10.0)

    def step(rate: float) -> ModelPlan:
        gateways = {"a": told(rate, stage.now_s + 10.0), "b": last}
        return stage.step(gateways=gateways, deployments=many)

    for age_s in (0, 10, 20, 30, 40, 50):
        plan = step(45.0)
        assert plan.targets == {"reserved": 2, "spot": 7}
        why = f"gateway b is late: its load is {age_s} s old"
        assert plan.alerts == ((why,) if age_s > 20 else ())
        assert (f"none goes while {why}" in plan.arithmetic) == (age_s > 20)
    assert sum(step(245.0).targets.values()) >= 25


def test_gateway_that_is_silent_for_long_is_left_out_and_told() -> None:
    stage = Stage(rules=replace(RULES, forecast_share=0.0), records=ready(reserved=2, spot=7))
    many = {"reserved": Bounds(2, 0, 2), "spot": Bounds(7, 0, 50)}
    last = told(45.0, stage.now_s + 10.0)
    for _ in range(30):
        gateways = {"a": told(45.0, stage.now_s + 10.0), "b": last}
        plan = stage.step(gateways=gateways, deployments=many)
        many = {name: replace(many[name], target=plan.targets[name]) for name in many}
    assert plan.targets == {"reserved": 2, "spot": 3}
    why = "gateway b is left out: it has told no load for"
    assert plan.alerts == (f"{why} 290 s; allowed: 60 s",)
    assert why in plan.changes[0].reason


@pytest.mark.parametrize("ahead_s", [-3600.0, -70.0, 300.0])
def test_directory_whose_clock_is_wrong_is_heard_and_missed_all_the_same(ahead_s: float) -> None:
    stage = Stage(records=ready(reserved=2, spot=3))
    have = {"reserved": Bounds(2, 0, 2), "spot": Bounds(3, 0, 50)}

    def step(told_s: float) -> ModelPlan:
        stats = directory_stats(Snapshot("v", stage.records), ahead_s, told_s)
        return stage.step(45.0, deployments=have, directory=(Report(told_s, stats),))

    for _ in range(3):
        plan = step(stage.now_s + 10.0 + ahead_s)
    assert plan.alerts == ()
    silent_since_s = stage.now_s + ahead_s
    alerts = [step(silent_since_s).alerts for _ in range(7)]
    assert [bool(each) for each in alerts] == [False] * 2 + [True] * 5


def test_gateway_whose_clock_is_wrong_is_heard_all_the_same() -> None:
    stage = Stage()
    for _ in range(5):
        at_s = stage.now_s + 10.0
        gateways = {"a": told(45.0, at_s), "b": told(45.0, at_s - 3600.0)}
        plan = stage.step(gateways=gateways)
    assert plan.alerts == ()
    assert plan.targets == {"reserved": 2, "spot": 7}
