"""Whole days: what a policy is shown, and that nothing is lost or counted twice."""

import numpy as np
import pytest
from simulated_days import OBJECTIVES, Scripted, always, class_setup, profile, run_day, steady

from autoscaling.observations import Tokens
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import Rules
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.engines import GatewayLimits
from autoscaling.simulator.world.spot_capacity import REGIMES, CapacitySeries, generate
from serving.domain.capacity.objectives import Objectives


def test_policy_is_shown_the_load_of_the_last_window() -> None:
    requests = steady(rate=6.0, duration_s=1000.0)
    policy = always(spot=2)
    run_day(requests, policy, class_setup(), ready_at_start={"spot": 2})
    for seen in policy.seen[10::20]:
        load = seen.load
        assert load is not None
        expected = np.diff(np.searchsorted(requests.arrival_s, [seen.now_s - 30, seen.now_s]))
        assert load.requests_per_s == pytest.approx(expected[0] / 30)
        assert (load.input_tokens_mean, load.output_tokens_mean) == (300, 60)
        assert load.num_in_flight == sum(view.num_in_flight for view in seen.fleet.slices)


def test_policy_is_shown_late_what_is_measured_late() -> None:
    requests = steady(rate=6.0, duration_s=1000.0)
    prompt, late = always(spot=2), always(spot=2)
    run_day(requests, prompt, class_setup())
    run_day(requests, late, class_setup(), measurement_delay_s=20.0)
    assert [seen.load for seen in late.seen[:2]] == [None, None]
    assert [seen.load for seen in late.seen[2:]] == [seen.load for seen in prompt.seen[:-2]]


def test_policy_is_shown_who_waits_while_there_is_no_engine() -> None:
    policy = always(spot=0)
    run_day(steady(rate=1.0, duration_s=1000.0), policy, class_setup())
    load = policy.seen[3].load
    assert load is not None
    assert load.num_waiting > 10
    assert 20 < load.oldest_wait_s <= 30


def test_policy_is_shown_assumed_tokens_until_the_first_are_measured() -> None:
    policy = always(spot=1)
    run_day(
        steady(rate=1.0, duration_s=1000.0),
        policy,
        class_setup(provisioning_s=30.0, load_s=5.0),
        assumed_tokens=Tokens(input=512, output=200),
    )
    shown = [seen.load for seen in policy.seen if seen.load is not None]
    means = [(each.input_tokens_mean, each.output_tokens_mean) for each in shown]
    # Until the slice is ready at 40 s, everybody waits at the door, where nobody counts tokens.
    assert means[3] == (512, 200)
    assert means[5] == (300, 60)


def test_without_slices_every_request_fails_at_its_deadline() -> None:
    outcome = run_day(steady(rate=2.0, duration_s=500.0), always(spot=0), class_setup())
    assert outcome.service.num_failed == outcome.service.num_requests
    assert outcome.service.served_ratio == outcome.service.slo_ratio == 0
    assert outcome.cost.total_usd == outcome.mean_slices == outcome.peak_slices == 0


def test_first_request_of_an_empty_fleet_is_answered_once_a_slice_is_ready() -> None:
    one = Requests(np.array([50.0]), np.array([10], np.int32), np.array([3], np.int32))
    script = Scripted([(0.0, {"spot": 0}), (60.0, {"spot": 1})])
    limits = GatewayLimits(request_deadline_s=200.0)
    outcome = run_day(one, script, class_setup(), limits=limits)
    # Wished for at 60; 60 s to come, 5 s to probe, 40 s to load.
    assert outcome.service.ttft_s[50] == pytest.approx(115.0108, abs=1e-3)


def test_every_request_ends_once_while_capacity_flaps() -> None:
    capacity = CapacitySeries(tuple(50.0 * n for n in range(20)), (8, 0, 3, 8, 1) * 4)
    outcome = run_day(
        steady(rate=30.0, duration_s=1000.0),
        always(spot=8, flex=1),
        class_setup(capacity=capacity, provisioning_s=5.0, load_s=5.0, notice_s=0.0),
        class_setup("flex", max_run_s=120.0, provisioning_s=5.0, load_s=5.0),
    )
    service = outcome.service
    assert service.num_served + service.num_failed + service.num_refused == service.num_requests
    assert service.num_moves > 100
    assert 0 < service.stall_s < 60


def test_same_seed_gives_the_same_day_and_another_seed_another() -> None:
    def day(seed: int) -> tuple[float, float, int]:
        capacity = generate(REGIMES["dry"], 6, seed=3, span_s=1000.0)
        classes = (class_setup(capacity=capacity, losses_per_hour=20.0), class_setup("other"))
        outcome = run_day(
            steady(rate=10.0, duration_s=1000.0), always(spot=6, other=2), *classes, seed=seed
        )
        return outcome.cost.total_usd, outcome.service.ttft_s[95], outcome.service.num_moves

    assert day(1) == day(1)
    assert day(1) != day(2)


def test_more_slices_never_serve_fewer() -> None:
    requests = steady(rate=20.0, duration_s=600.0)
    outcomes = [
        run_day(
            requests,
            always(spot=count),
            class_setup(provisioning_s=30.0 * count),
            duration_s=600.0,
        )
        for count in (0, 1, 2, 3)
    ]
    at_once = [
        run_day(requests, always(spot=count), class_setup(), ready_at_start={"spot": count})
        for count in (1, 2, 4, 8)
    ]
    assert outcomes[0].service.num_served < outcomes[1].service.num_served
    ratios = [outcome.service.slo_ratio for outcome in at_once]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.7
    assert ratios[-1] == 1


def test_fleet_with_room_gives_the_latencies_of_the_closed_form() -> None:
    requests = steady(rate=24.0, duration_s=1000.0)
    outcome = run_day(requests, always(spot=8), class_setup(), ready_at_start={"spot": 8})
    step_s = profile().step_s(24.0 / 8, 300, 60)
    assert outcome.service.served_ratio == 1
    assert outcome.service.tpot_s[50] == pytest.approx(step_s, rel=0.03)
    # Half a step until the next begins, and that one with the prompt in it.
    ttft_s = step_s / 2 + step_s + 300 * 0.00004
    assert outcome.service.ttft_s[50] == pytest.approx(ttft_s, rel=0.1)


def test_progress_goes_from_nothing_towards_everything() -> None:
    shares: list[float] = []
    setup = SimulationSetup(
        steady(rate=1.0, duration_s=100.0), profile(), (class_setup(),), OBJECTIVES, 100.0
    )
    simulate(setup, always(spot=1), shares.append)
    assert shares == pytest.approx([n / 10 for n in range(10)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tick_s": 0.0}, "tick_s is 0; allowed: above 0"),
        ({"drain_s": -1.0}, "drain_s is -1; allowed: at least 0"),
        ({"ready_at_start": {"spot": 99}}, r"ready_at_start.spot is 99; allowed: 0 to 50"),
        ({"ready_at_start": {"gold": 1}}, r"ready_at_start.gold is 1; allowed: 0 to 0"),
        ({"classes": (class_setup(), class_setup())}, "each name once"),
    ],
)
def test_setup_out_of_range_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_day(steady(rate=1.0, duration_s=10.0), always(spot=1), class_setup(), **changes)


@pytest.mark.slow
def test_policy_corrects_a_profile_that_is_too_good() -> None:
    """Ten slices carry it. By the profile they were seven, and eight with the spread."""
    real = profile()
    too_good = profile(
        per_sequence_s=real.per_sequence_s / 2, per_prompt_token_s=real.per_prompt_token_s / 2
    )
    on_demand = class_setup("on-demand", provisioning_s=30.0, load_s=30.0)
    policy = SlicewisePolicy(too_good, [on_demand.terms], Rules(OBJECTIVES))
    setup = SimulationSetup(
        requests=steady(rate=175.0, duration_s=1800.0),
        profile=real,
        classes=(on_demand,),
        objectives=OBJECTIVES,
        duration_s=1800.0,
        ready_at_start={"on-demand": 6},
    )
    outcome = simulate(setup, policy)
    ready = outcome.timeline.num_ready
    assert ready[-30:].min() >= 10
    late = outcome.requests.arrival_s > 1200.0
    assert np.nanpercentile(outcome.answers.first_s[late], 99) < OBJECTIVES.ttft_s


def test_policy_is_shown_how_many_kept_to_each_objective() -> None:
    """While a slice has just too much to do, against the answers themselves."""
    requests = steady(rate=17.5, duration_s=900.0)
    policy, objectives = always(spot=1), Objectives(ttft_s=1.0, tpot_s=0.022)
    outcome = run_day(
        requests,
        policy,
        class_setup(),
        ready_at_start={"spot": 1},
        window_s=10.0,
        objectives=objectives,
    )
    shown = [seen.load for seen in policy.seen[1:] if seen.load is not None]
    answers = outcome.answers
    until_s = policy.seen[-1].now_s
    first_s = answers.first_s[requests.arrival_s + answers.first_s <= until_s]
    has_ended = requests.arrival_s + answers.last_s <= until_s
    tpot_s = (answers.last_s - answers.first_s)[has_ended] / (requests.output_tokens - 1)[has_ended]
    num_late = int((first_s > objectives.ttft_s).sum())
    num_slow = int((tpot_s > objectives.tpot_s).sum())
    assert sum(each.num_ttft_missed for each in shown) == num_late
    assert sum(each.num_ttft_met for each in shown) == len(first_s) - num_late
    assert sum(each.num_tpot_missed for each in shown) == num_slow
    assert sum(each.num_tpot_met for each in shown) == len(tpot_s) - num_slow
    assert min(num_late, num_slow, len(first_s) - num_late, len(tpot_s) - num_slow) > 0
