"""What a policy is told of slices while the directory, a gateway or Serve tells nothing of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from test_model_scaler import NOW_S, RULES, SILENT, Stage, deployed, lost, ready, told

from autoscaling.observations import Report
from serving.domain.capacity.engine_rates import EngineRate, rate_stats
from serving.domain.load_report import LoadSample, directory_stats, load_stats
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.orders import NO_ORDERS, OperatorOrder, OrderKind
from tests.supply_builders import hosts_of, life

# Nothing of a season, and a decline has to last for five minutes.
PATIENT = replace(RULES, forecast_share=0.0, drain_delay_s=300.0)


def waiting(count: int, at_s: float) -> tuple[SliceRecord, ...]:
    """Replicas that wait for a slice of spot."""
    begun = SliceLifecycle.begin(at_s).enter(SliceState.PROVISIONING, at_s, "none is free")
    return tuple(SliceRecord(f"w-{number}", "m", "spot", begun) for number in range(count))


def test_policy_that_has_just_begun_withdraws_no_order_for_as_long_as_a_decline_has_to_last() -> (
    None
):
    """Of the demand before it knows nothing; what waits in a queue would begin at its end again."""
    stage = Stage(rules=PATIENT, records=waiting(12, NOW_S))
    targets = {"reserved": 0, "spot": 12}
    while stage.now_s < NOW_S + 300.0:
        plan = stage.step(25.0, deployments=deployed(targets))
        assert plan.targets["spot"] == 12
        assert "this policy has just begun, and none goes for" in plan.arithmetic
        targets = dict(plan.targets)
    plan = stage.step(25.0, deployments=deployed(targets))
    assert plan.targets["spot"] < 12
    assert "just begun" not in plan.arithmetic


def test_policy_that_has_just_begun_keeps_within_bounds_and_pins() -> None:
    stage = Stage(rules=PATIENT, records=waiting(12, NOW_S))
    many = deployed({"reserved": 0, "spot": 12})
    narrow = many | {"spot": replace(many["spot"], most=8)}
    assert stage.step(25.0, deployments=narrow).targets["spot"] == 8
    stage.orders = NO_ORDERS.given(
        OperatorOrder(OrderKind.PIN, "ada", "a drill", 0.0, "spot", model="m", num_replicas=2)
    )
    assert stage.step(25.0, deployments=narrow).targets["spot"] == 2


def test_orders_that_serve_starts_one_after_the_other_are_each_as_old_as_they_are() -> None:
    """While a fleet grows there is always one that has not started: not the same one for ever."""
    stage = Stage(rules=replace(RULES, forecast_share=0.0))
    plan = stage.step(25.0)
    for number in range(1, 60):
        # Each is started half a minute after it was asked for, and serves at once.
        stage.records = ready(reserved=2, spot=max(0, number - 3))
        have = deployed({"reserved": 2, "spot": number})
        plan = stage.step(20.0 + 10.0 * number, deployments=have)
        assert not any("backing off" in each.reason for each in plan.refusals)
        assert not any("late" in each.reason for each in plan.refusals)
    assert plan.targets["spot"] > 50


def rates_of(**counts: float) -> tuple[EngineRate, ...]:
    """Engines with so many sequences each."""
    return tuple(
        EngineRate(f"engine-{name}", "spot", 0.0, 100.0 * number, 0.01)
        for name, number in counts.items()
    )


def gateway_with(rates: Sequence[EngineRate], at_s: float) -> Report:
    sample = LoadSample(45.0, 0, 0.0, 0, None, None)
    return Report(at_s, load_stats("m", sample) | rate_stats("m", rates))


def of_engines(*names: str) -> tuple[SliceRecord, ...]:
    return tuple(
        replace(life(name, hosts_of(name), model="m"), engine_id=f"engine-{name}") for name in names
    )


def test_engine_of_which_a_draining_gateway_told_is_as_full_as_it_was() -> None:
    """Serve does not list that gateway any more, though its streams go on for minutes."""
    stage = Stage(records=of_engines("busy", "calm", "mid"))
    have = deployed({"reserved": 0, "spot": 3})

    def step(**gateways: Report) -> tuple[str, ...]:
        return stage.step(deployments=have, gateways=gateways).drain_order

    def at_s() -> float:
        return stage.now_s + 10.0

    leaving, staying = rates_of(busy=20.0), rates_of(calm=1.0, mid=5.0)
    order = step(a=gateway_with(leaving, at_s()), b=gateway_with(staying, at_s()))
    assert order == ("calm", "mid", "busy")
    for _ in range(12):
        assert step(b=gateway_with(staying, at_s())) == ("calm", "mid", "busy")
    # Somebody else tells of it: that counts.
    empty = rates_of(busy=0.1, calm=1.0, mid=5.0)
    assert step(b=gateway_with(empty, at_s())) == ("busy", "calm", "mid")


def test_engine_of_which_a_late_gateway_told_is_as_full_as_it_was_and_an_idle_one_is_not() -> None:
    stage = Stage(records=of_engines("busy", "calm"))
    have = deployed({"reserved": 0, "spot": 2})
    last = gateway_with(rates_of(busy=20.0), stage.now_s + 10.0)

    def step(*staying: EngineRate) -> tuple[str, ...]:
        own = gateway_with(staying, stage.now_s + 10.0)
        return stage.step(deployments=have, gateways={"a": last, "b": own}).drain_order

    for _ in range(12):
        assert step(*rates_of(calm=1.0)) == ("calm", "busy")
    # Its own gateway is heard again, and shows it without a step.
    last = gateway_with((), stage.now_s + 10.0)
    assert step(*rates_of(calm=1.0)) == ("busy", "calm")


def test_silent_directory_brings_nothing_back_that_was_just_given_up() -> None:
    stage = Stage(rules=replace(RULES, forecast_share=0.0), records=ready(reserved=2, spot=8))
    have = {"reserved": 2, "spot": 8}
    before = stage.step(45.0, deployments=deployed(have))
    assert before.targets == {"reserved": 2, "spot": 3}
    for _ in range(5):
        plan = stage.step(45.0, deployments=deployed(before.targets), **SILENT)
        assert plan.targets == before.targets
    slices = stage.sink.observations[-1].fleet.slices
    kept = {each.slice_id for each in slices if each.compute_class == "spot"}
    assert kept == {f"spot-{number}" for number in range(8)} - set(before.drain_order[:5])


def test_directory_that_tells_nothing_new_is_late_as_soon_as_a_gateway_would_be() -> None:
    """What it told last may be lost by now: nothing else is given up for it."""
    stage = Stage(rules=replace(RULES, forecast_share=0.0), records=ready(reserved=2, spot=8))
    have = deployed({"reserved": 2, "spot": 8})
    stats = directory_stats(Snapshot("v", stage.records), 0.0, NOW_S + 10.0)
    last = (Report(NOW_S + 10.0, stats),)
    stage.step(90.0, deployments=have, directory=last)
    for _ in range(2):
        stage.step(90.0, deployments=have, directory=last)
    plan = stage.step(45.0, deployments=have, directory=last)
    assert plan.targets == {"reserved": 2, "spot": 8}
    assert "the directory's list is 30 s old; allowed: 20 s" in plan.arithmetic


def test_end_of_which_two_tell_is_one_loss() -> None:
    """Its lease was over, so its end was presumed; then its replica told of it, with its time."""
    stage = Stage()
    stage.step(5.0)
    stage.ended = (lost("r-1", NOW_S + 12.0),)
    stage.step(5.0)
    stage.ended = (lost("r-1", NOW_S + 15.0),)
    stage.step(5.0)
    losses = [[each.slice_id for each in seen.fleet.losses] for seen in stage.sink.observations]
    assert losses == [[], ["r-1"], []]


def test_plan_that_stands_has_the_order_of_the_one_before() -> None:
    stage = Stage(records=of_engines("busy", "calm"))
    have = deployed({"reserved": 0, "spot": 2})
    rates = rates_of(busy=20.0, calm=1.0)
    gateways = {"a": gateway_with(rates, stage.now_s + 10.0)}
    before = stage.step(deployments=have, gateways=gateways)
    assert before.drain_order == ("calm", "busy")
    held = stage.step(deployments=have, gateways={})
    assert held.demand_slices is None
    assert held.drain_order == before.drain_order


def test_gateway_that_has_just_begun_holds_no_slice_while_others_tell() -> None:
    rules = replace(RULES, forecast_share=0.0, drain_delay_s=40.0)
    stage = Stage(rules=rules, records=ready(reserved=2, spot=8))
    have = {"reserved": 2, "spot": 8}
    fell: list[Any] = []
    for number in range(40):
        # Every half a minute one takes the place of another, and tells its load ten seconds later.
        new = None if number % 3 == 0 else told(20.0, stage.now_s + 10.0)
        gateways = {"a": told(25.0, stage.now_s + 10.0), f"b-{number // 3}": new}
        plan = stage.step(deployments=deployed(have), gateways=gateways)
        fell.append(plan.targets["spot"] < have["spot"])
        have = dict(plan.targets)
        stage.records = ready(**have)
    assert any(fell)
    assert have == {"reserved": 2, "spot": 3}


@pytest.mark.parametrize("silent_s", [10.0, 20.0])
def test_gateway_that_is_silent_for_longer_holds_them(silent_s: float) -> None:
    stage = Stage(rules=replace(RULES, forecast_share=0.0), records=ready(reserved=2, spot=8))
    have = deployed({"reserved": 2, "spot": 8})
    stage.step(90.0, deployments=have)
    plan = None
    for _ in range(round(silent_s / 10.0) + 1):
        gateways = {"a": told(90.0, stage.now_s + 10.0), "b": None}
        plan = stage.step(deployments=have, gateways=gateways)
    assert plan is not None
    assert "gateway b is silent: it has told no load of m" in plan.arithmetic
