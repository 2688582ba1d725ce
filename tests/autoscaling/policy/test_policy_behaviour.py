"""What an operator relies on: the policy in a small world, through its only door."""

from dataclasses import replace
from typing import Any

import pytest
from policy_world import (
    ALL,
    ANY_PRICE,
    FLEX,
    ON_DEMAND,
    PROFILE,
    RESERVED,
    RULES,
    SPOT,
    TICK_S,
    World,
    load,
)

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.records import Fleet, Observation, SliceView
from serving.domain.slice_lifecycle import SliceState


def test_load_that_one_slice_carries_takes_one_prepaid_slice() -> None:
    world = World.of()
    world.run(9.0, 600)
    assert world.targets == {"reserved": 1, "spot": 0, "flex-start": 0, "on-demand": 0}


def test_prepaid_slices_come_first_then_the_cheapest() -> None:
    world = World.of()
    world.run(48.0, 600)
    assert world.targets == {"reserved": 2, "spot": 3, "flex-start": 0, "on-demand": 0}
    assert world.ready() == 5


def test_floor_is_kept_on_classes_that_are_not_lost_together() -> None:
    world = World.of(rules=replace(RULES, floor_ratio=0.6, floor_price_ratio=ANY_PRICE))
    world.run(98.0, 600)  # ten slices: six must stay when spot goes
    assert world.targets == {"reserved": 2, "spot": 4, "flex-start": 4, "on-demand": 0}


def test_two_zones_of_spot_keep_the_floor_cheaper_than_a_dear_class() -> None:
    zones = [replace(SPOT, name=f"spot-{zone}", correlation_group=zone) for zone in "ab"]
    world = World.of(*zones, ON_DEMAND, rules=replace(RULES, floor_ratio=0.5))
    world.run(98.0, 600)
    assert world.targets == {"spot-a": 5, "spot-b": 5, "on-demand": 0}


def test_slices_go_that_load_then_the_dearest_then_those_that_end_soonest_or_are_emptiest() -> None:
    def view(name: str, compute_class: str = "spot", **fields: Any) -> SliceView:
        state = fields.pop("state", SliceState.READY)
        return SliceView(name, compute_class, state, 0.0, 0.0, **fields)

    slices = (
        view("busy", num_in_flight=9),
        view("idle"),
        view("ends", num_in_flight=9, expires_at_s=9000.0),
        view("loads", state=SliceState.LOADING),
        view("dear", "on-demand", num_in_flight=9),
        view("waits", state=SliceState.PROVISIONING),
        view("drains", state=SliceState.DRAINING),
    )
    policy = SlicewisePolicy(PROFILE, ALL, RULES)
    fleet = Fleet(slices, {"spot": 5, "on-demand": 1})
    plan = policy.decide(Observation(100.0, load(9.0, 100.0), fleet))
    assert plan.drain_order == ("loads", "dear", "ends", "idle", "busy")


def test_loss_of_all_spot_is_answered_within_one_decision() -> None:
    world = World.of()
    world.run(48.0, 600)
    world.lose("spot")
    world.dry.add("spot")
    plan = world.step(48.0)
    assert plan.targets["flex-start"] == 3
    assert plan.targets["spot"] == 3, "its wishes stay open"
    reasons = [each.reason for each in plan.refusals if each.compute_class == "spot"]
    assert reasons == ["backing off: all 3 slices were lost at once"]


@pytest.mark.parametrize("cause", ["unhealthy", "boot_failed", "replica_lost"])
def test_crash_of_all_engines_of_a_class_is_the_models_and_buys_no_other_class(cause: str) -> None:
    world = World.of()
    world.run(48.0, 600)
    before = dict(world.targets)
    world.lose("spot", cause=cause)
    plan = world.step(48.0)
    assert plan.targets == before
    assert plan.refusals == ()
    assert f"failed within an hour: 3 {cause}, which no class is blamed for" in plan.arithmetic
    assert "failed" in world.run(48.0, 3500).arithmetic
    assert "failed" not in world.run(48.0, 200).arithmetic


def test_load_returns_to_spot_when_it_is_back_and_the_bridge_goes_after_it_is_ready() -> None:
    world = World.of()
    world.run(48.0, 600)
    world.lose("spot")
    world.dry.add("spot")
    world.run(48.0, 900)
    assert (world.ready("spot"), world.ready("flex-start")) == (0, 3)
    world.dry.clear()
    while world.targets["flex-start"]:
        world.step(48.0)
        assert world.ready() >= 5, "never fewer than the need while the load moves back"
        assert world.now_s < 10_000
    assert world.ready("spot") == 3


def test_class_that_does_not_deliver_is_bridged_after_its_patience() -> None:
    patient = replace(SPOT, patience_s=90.0)
    world = World.of(RESERVED, patient, FLEX, ON_DEMAND)
    world.dry.add("spot")
    world.run(48.0, 80)
    assert world.targets["flex-start"] == 0
    world.run(48.0, 40)
    assert world.targets["flex-start"] == 3
    assert world.targets["spot"] == 3


def test_bridge_wish_is_cancelled_when_the_late_class_delivers_first() -> None:
    slow = replace(FLEX, provisioning_s=3000.0)
    world = World.of(RESERVED, replace(SPOT, patience_s=90.0), slow)
    world.dry.add("spot")
    world.run(48.0, 200)
    assert world.targets["flex-start"] == 3
    world.dry.clear()
    world.run(48.0, 200)
    assert world.targets["flex-start"] == 0
    assert world.ready("flex-start") == 0


def test_dearer_class_that_was_late_as_well_is_asked_until_it_is_back() -> None:
    """Where all deliver it has no part: it is asked for what it would have if it alone did."""
    world = World.of()
    world.dry |= {"spot", "flex-start"}
    world.run(48.0, 900)
    assert (world.ready("reserved"), world.ready("on-demand")) == (2, 3)
    assert (world.targets["spot"], world.targets["flex-start"]) == (3, 3)
    world.dry.remove("flex-start")
    world.run(48.0, 900)
    assert (world.ready("flex-start"), world.targets["on-demand"]) == (3, 0)


def test_growth_is_at_once_and_decline_waits() -> None:
    # Without a margin for past errors: this load errs by threefold twice in half an hour.
    world = World.of(rules=replace(RULES, forecast_share=0.0))
    world.run(18.0, 600)
    assert sum(world.targets.values()) == 2
    world.run(58.0, 30)
    assert sum(world.targets.values()) >= 6
    world.run(58.0, 1200)  # until the step is no trend any more
    assert sum(world.targets.values()) == 6
    world.run(18.0, RULES.drain_delay_s - 2 * TICK_S)
    assert sum(world.targets.values()) == 6
    world.run(18.0, 2 * RULES.drain_delay_s)
    assert sum(world.targets.values()) == 2


def test_dearest_slices_go_first() -> None:
    world = World.of(rules=replace(RULES, forecast_share=0.0))
    world.run(48.0, 600)
    world.lose("spot")
    world.dry.add("spot")
    world.run(48.0, 600)
    world.run(28.0, 1500)
    assert world.ready("flex-start") == 1
    assert world.ready("reserved") == 2


def test_rise_that_chance_does_not_explain_is_believed_at_once() -> None:
    world = World.of()
    world.run(18.0, 600)
    assert sum(world.step(58.0).targets.values()) >= 6


def test_requests_that_engines_cannot_run_count_as_waiting() -> None:
    world = World.of(rules=replace(RULES, forecast_share=0.0))
    world.run(18.0, 900)
    world.step(18.0, num_in_flight=90)  # two slices run a hundred at once
    assert sum(world.targets.values()) == 2
    assert sum(world.step(18.0, num_in_flight=160).targets.values()) == 3


def test_no_change_under_constant_load() -> None:
    world = World.of()
    world.run(48.0, 900)
    before = dict(world.targets)
    for _ in range(400):
        plan = world.step(48.0)
        assert plan.targets == before
        assert plan.decisions == ()


def test_goes_to_zero_after_idle_time_and_back_for_one_waiting_request() -> None:
    world = World.of()
    world.run(9.0, 600)
    world.run(0.0, RULES.idle_s + RULES.drain_delay_s + 30 * TICK_S)
    # Prepaid slices cost nothing, but a slice that nobody uses is given back all the same.
    assert world.targets == {"reserved": 0, "spot": 0, "flex-start": 0, "on-demand": 0}
    plan = world.step(0.0, num_waiting=1)
    assert sum(plan.targets.values()) == 1
    assert world.step(0.0, num_waiting=1).next_slice_at_s is not None


def test_next_slice_is_expected_at_the_end_of_its_lead_time() -> None:
    world = World.of()
    world.step(9.0)
    plan = world.step(9.0)
    requested_at_s = world.slices[0].requested_at_s
    assert plan.next_slice_at_s == requested_at_s + RESERVED.provisioning_s + RESERVED.load_s


@pytest.mark.parametrize("stale", [None, load(99.0, at_s=0.0)])
def test_missing_or_stale_load_holds_the_last_plan_and_alerts(stale: object) -> None:
    world = World.of()
    world.run(48.0, 600)
    fleet = Fleet(tuple(world.slices), dict(world.targets))
    plan = world.policy.decide(Observation(world.now_s + TICK_S, stale, fleet))  # type: ignore[arg-type]
    assert plan.targets == world.targets
    assert plan.decisions == ()
    assert len(plan.alerts) == 1


def test_slices_on_their_way_are_not_bought_twice() -> None:
    world = World.of()
    plans = [world.step(48.0) for _ in range(20)]
    assert {sum(plan.targets.values()) for plan in plans[3:]} == {5}


def test_slice_that_expires_is_replaced_before_it_goes() -> None:
    world = World.of(FLEX)
    world.run(18.0, 600)
    world.slices = [
        replace(each, expires_at_s=world.now_s + 100) if place == 0 else each
        for place, each in enumerate(world.slices)
    ]
    assert world.step(18.0).targets["flex-start"] == 3


def test_every_change_has_a_reason_with_its_numbers() -> None:
    world = World.of()
    plan = world.step(48.0)
    assert {each.compute_class for each in plan.decisions} == {"reserved", "spot"}
    for each in plan.decisions:
        assert "need 5, 0 ready" in each.reason
    assert "48.00 requests/s" in plan.arithmetic


def test_unknown_pair_of_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="each once"):
        SlicewisePolicy(PROFILE, [*ALL, SPOT], RULES)
