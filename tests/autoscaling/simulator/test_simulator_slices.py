"""Lives of simulated slices: how they come, how they are lost, how they are given up."""

import pytest
from simulated_days import Scripted, always, class_setup, run_day, steady

from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.world.slices import SliceRun
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.slice_lifecycle import HELD_STATES, EndCause, SliceState

FEW = steady(rate=1.0, duration_s=1000.0)


def lives_of(outcome: SimulationOutcome, cause: EndCause | None) -> list[SliceRun]:
    return [life for life in outcome.lives if life.cause == cause]


def test_slice_is_ready_after_provisioning_probing_and_loading() -> None:
    outcome = run_day(FEW, always(spot=1), class_setup(provisioning_s=60, load_s=40))
    (life,) = outcome.lives
    assert (life.requested_at_s, life.held_at_s, life.ready_at_s) == (0.0, 60.0, 105.0)
    assert outcome.seconds["spot", SliceState.PROVISIONING] == pytest.approx(60)
    assert outcome.seconds["spot", SliceState.LOADING] == pytest.approx(40)
    assert outcome.seconds["spot", SliceState.READY] == pytest.approx(895)


def test_wish_waits_until_there_is_capacity() -> None:
    capacity = CapacitySeries((0.0, 300.0), (1, 2))
    outcome = run_day(FEW, always(spot=3), class_setup(capacity=capacity))
    assert sorted(life.held_at_s or 9999.0 for life in outcome.lives) == [60.0, 360.0, 9999.0]


def test_fall_of_capacity_takes_the_surplus_after_the_notice_and_it_is_asked_for_again() -> None:
    capacity = CapacitySeries((0.0, 400.0, 600.0), (4, 1, 4))
    policy = always(spot=4)
    outcome = run_day(FEW, policy, class_setup(capacity=capacity, notice_s=20.0))
    lost = lives_of(outcome, EndCause.PREEMPTED)
    assert [life.ended_at_s for life in lost] == [420.0] * 3
    again = [life for life in outcome.lives if life.requested_at_s == 400.0]
    assert [life.held_at_s for life in again] == [660.0] * 3
    (told,) = [seen for seen in policy.seen if seen.fleet.losses]
    assert told.now_s == 400.0
    assert {loss.slice_id for loss in told.fleet.losses} == {life.slice_id for life in lost}
    assert {view.state for view in told.fleet.slices} == {
        SliceState.READY,
        SliceState.DRAINING,
        SliceState.PROVISIONING,
    }


def test_fall_of_capacity_takes_back_first_what_has_not_come_yet() -> None:
    capacity = CapacitySeries((0.0, 200.0, 205.0), (4, 4, 2))
    script = Scripted([(0.0, {"spot": 2}), (200.0, {"spot": 4})])
    outcome = run_day(FEW, script, class_setup(capacity=capacity))
    assert not lives_of(outcome, EndCause.PREEMPTED)
    assert [life.held_at_s for life in outcome.lives].count(None) == 2


def test_flex_start_ends_at_its_run_time_which_is_known_before() -> None:
    policy = always(flex=1)
    outcome = run_day(FEW, policy, class_setup("flex", max_run_s=300.0))
    expired = lives_of(outcome, EndCause.EXPIRED)
    assert [life.ended_at_s - (life.held_at_s or 0.0) for life in expired] == [300.0, 300.0, 280.0]
    # Its successor is asked for when the drain begins, 30 s before.
    assert sorted(life.requested_at_s for life in outcome.lives) == [0.0, 330.0, 660.0, 990.0]
    known = {view.expires_at_s for seen in policy.seen for view in seen.fleet.slices}
    assert known == {None, 360.0, 690.0, 1020.0}


def test_single_losses_come_at_the_rate_of_the_conditions() -> None:
    outcome = run_day(
        FEW,
        always(spot=50),
        class_setup(losses_per_hour=10.0, provisioning_s=1.0, load_s=1.0),
        duration_s=8000.0,
    )
    # About 1000 losses: the tolerance is three standard deviations.
    in_danger = HELD_STATES - {SliceState.DRAINING}
    held_s = sum(outcome.seconds.get(("spot", state), 0.0) for state in in_danger)
    num_lost = len(lives_of(outcome, EndCause.PREEMPTED))
    assert num_lost == pytest.approx(10 * held_s / 3600, rel=0.1)


def test_lowered_target_ends_wishes_first_then_the_plans_order_then_the_youngest() -> None:
    capacity = CapacitySeries.constant(4)
    script = Scripted(
        [(0.0, {"spot": 4}), (200.0, {"spot": 6}), (300.0, {"spot": 2})], drain_order=("spot-2",)
    )
    outcome = run_day(FEW, script, class_setup(capacity=capacity))
    ends_s = {life.slice_id: life.ended_at_s for life in lives_of(outcome, EndCause.RELEASED)}
    assert ends_s == {"spot-5": 300.0, "spot-6": 300.0, "spot-2": 330.0, "spot-4": 330.0}


def test_target_beyond_the_quota_gets_the_quota() -> None:
    policy = always(spot=9)
    outcome = run_day(FEW, policy, class_setup(max_slices=3))
    assert len(outcome.lives) == 3
    assert policy.seen[-1].fleet.targets == {"spot": 3}


def test_time_in_states_adds_up_to_the_lives() -> None:
    capacity = CapacitySeries((0.0, 333.0, 500.0, 700.0), (9, 2, 7, 3))
    script = Scripted([(0.0, {"spot": 9, "flex": 2}), (600.0, {"spot": 3, "flex": 4})])
    outcome = run_day(
        FEW,
        script,
        class_setup(capacity=capacity, losses_per_hour=5.0),
        class_setup("flex", max_run_s=250.0),
    )
    lived_s = sum(life.ended_at_s - life.requested_at_s for life in outcome.lives)
    assert sum(outcome.seconds.values()) == pytest.approx(lived_s)
    held_s = sum(
        life.ended_at_s - life.held_at_s for life in outcome.lives if life.held_at_s is not None
    )
    in_states_s = sum(s for (_, state), s in outcome.seconds.items() if state in HELD_STATES)
    assert in_states_s == pytest.approx(held_s)
    assert {life.cause for life in outcome.lives} == {
        None,
        EndCause.PREEMPTED,
        EndCause.EXPIRED,
        EndCause.RELEASED,
    }


def test_plan_for_an_unknown_class_is_refused() -> None:
    with pytest.raises(ValueError, match="targets for gold; allowed: spot"):
        run_day(FEW, always(gold=1), class_setup())
