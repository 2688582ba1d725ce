"""The sums over a day: service, cost, timeline."""

import math

import numpy as np
import pytest
from simulated_days import Scripted, always, class_setup, run_day, steady

from autoscaling.records import Decision, Observation, Plan
from autoscaling.simulator.world.arrivals import Requests
from serving.domain.capacity.objectives import Objectives
from serving.domain.slice_lifecycle import HELD_STATES, SliceState

DAY = steady(rate=10.0, duration_s=1000.0)


def test_cost_is_held_time_times_price_and_prepaid_capacity_whole() -> None:
    outcome = run_day(
        DAY,
        always(spot=2, reserved=1),
        class_setup(usd_per_slice_hour=3.6),
        class_setup("reserved", usd_per_slice_hour=7.2, is_prepaid=True, max_slices=4),
    )
    assert outcome.cost.usd_by_class["spot"] == pytest.approx(2 * (1000 - 60) * 0.001)
    assert outcome.cost.usd_by_class["reserved"] == pytest.approx(4 * 1000 * 0.002)
    assert outcome.cost.committed_usd == outcome.cost.usd_by_class["reserved"]
    assert outcome.cost.total_usd == pytest.approx(sum(outcome.cost.usd_by_class.values()))


def test_cost_is_the_same_to_the_last_bit_in_whichever_order_states_are_added_up() -> None:
    policy = Scripted([(at_s, {"spot": 1 + at % 3}) for at, at_s in enumerate(range(0, 900, 70))])
    spot = class_setup(provisioning_s=31.7, load_s=17.3, usd_per_slice_hour=3600.0)
    outcome = run_day(steady(1.0, 900.0), policy, spot)
    held_s = [spent_s for (_, state), spent_s in outcome.seconds.items() if state in HELD_STATES]
    assert len(held_s) > 3
    for _ in range(len(held_s)):
        held_s.append(held_s.pop(0))
        assert outcome.cost.usd_by_class["spot"] == math.fsum(held_s) / 3600 * 3600.0


def test_slice_is_paid_until_its_drain_is_over() -> None:
    script = Scripted([(0.0, {"spot": 1}), (500.0, {"spot": 0})])
    outcome = run_day(DAY, script, class_setup(usd_per_slice_hour=3.6), drain_s=20.0)
    assert outcome.cost.total_usd == pytest.approx((520 - 60) * 0.001)


def test_slo_ratio_counts_all_requests_and_both_objectives() -> None:
    kept = run_day(DAY, always(spot=2), class_setup(), ready_at_start={"spot": 2})
    assert kept.service.slo_ratio == 1
    for objectives in (Objectives(1e-3, 1.0), Objectives(1.0, 1e-3)):
        missed = run_day(
            DAY, always(spot=2), class_setup(), ready_at_start={"spot": 2}, objectives=objectives
        )
        assert (missed.service.served_ratio, missed.service.slo_ratio) == (1, 0)


def test_long_prompt_is_allowed_its_time() -> None:
    prompts = np.array([100, 4000], np.int32)
    two = Requests(np.array([1.0, 100.0]), prompts, np.array([2, 2], np.int32))

    def slo_ratio(objectives: Objectives) -> float:
        ready = {"spot": 1}
        outcome = run_day(
            two, always(spot=1), class_setup(), ready_at_start=ready, objectives=objectives
        )
        first_s = outcome.answers.first_s
        assert first_s[0] < 0.1 < first_s[1] < 4000 * 1e-4
        return outcome.service.slo_ratio

    assert slo_ratio(Objectives(0.1, 1.0)) == 0.5
    assert slo_ratio(Objectives(0.1, 1.0, ttft_per_prompt_token_s=1e-4)) == 1


def test_request_of_one_token_has_no_tpot_to_miss() -> None:
    one = Requests(np.array([1.0]), np.array([10], np.int32), np.array([1], np.int32))
    outcome = run_day(one, always(spot=1), class_setup(), ready_at_start={"spot": 1})
    assert outcome.service.slo_ratio == 1
    assert np.isnan(outcome.service.tpot_s[50])


def test_day_without_requests_served_them_all() -> None:
    outcome = run_day(DAY.until(0.0), always(spot=1), class_setup())
    assert (outcome.service.num_requests, outcome.service.served_ratio) == (0, 1)


def test_timeline_has_every_slice_of_every_tick() -> None:
    outcome = run_day(DAY, always(spot=3), class_setup(usd_per_slice_hour=2.0))
    timeline = outcome.timeline
    assert len(timeline.at_s) == 100
    assert timeline.num_ready[-1] == timeline.num_held[-1] == 3
    assert timeline.usd_per_hour[-1] == 6
    held = sum(counts for (_, state), counts in timeline.slices.items() if state in HELD_STATES)
    np.testing.assert_array_equal(held, timeline.num_held)
    assert timeline.slices["spot", SliceState.PROVISIONING][3] == 3
    assert outcome.peak_slices == 3
    assert outcome.mean_slices == pytest.approx(3 * 0.94)
    assert outcome.seconds["spot", SliceState.READY] == pytest.approx(1000 * 3 * 0.895)


def test_service_timeline_adds_up_to_the_day() -> None:
    outcome = run_day(DAY, always(spot=3), class_setup())
    course = outcome.service_timeline(300.0)
    spans_s = [300.0, 300.0, 300.0, 100.0]
    assert course.at_s.tolist() == [0.0, 300.0, 600.0, 900.0]
    assert (course.arrivals_per_s * spans_s).sum() == pytest.approx(len(DAY))
    met = outcome.service.slo_ratio * len(DAY)
    assert (course.goodput_per_s * spans_s).sum() == pytest.approx(met)
    assert course.goodput_per_s[0] < course.arrivals_per_s[0]
    assert course.ttft_p99_s[0] > 30 > 1 > course.ttft_p99_s[2]


class Talkative:
    name = "talkative"

    def decide(self, observation: Observation) -> Plan:
        refusal = Decision("spot", 1, "out of stock")
        added = (Decision("spot", 1, "load"),) if observation.now_s == 20 else ()
        return Plan(observation.now_s, {"spot": 1}, added, (refusal,), demand_slices=0.5)


def test_timeline_keeps_decisions_and_says_a_standing_refusal_once() -> None:
    outcome = run_day(DAY, Talkative(), class_setup())  # type: ignore[arg-type]
    assert [(each.at_s, each.decision.reason) for each in outcome.timeline.decisions] == [
        (20.0, "load")
    ]
    assert [each.decision.reason for each in outcome.timeline.refusals] == ["out of stock"]
    assert set(outcome.timeline.demand_slices) == {0.5}
    assert outcome.policy == "talkative"


def test_objectives_that_nothing_can_meet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ttft_s is 0\.0; allowed: above 0"):
        Objectives(0.0, 1.0)
