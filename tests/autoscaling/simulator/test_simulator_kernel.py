"""The leaping engines against a simulation step by step, and against the closed form."""

import numpy as np
import pytest
from simulated_days import OBJECTIVES, come_or_go, profile, steady, varied
from step_by_step import StepByStep

from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.engines import Answers, Engines, GatewayLimits
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile

FOREVER = GatewayLimits(request_deadline_s=1e6, max_waiting_requests=1_000_000)


def run_engines(requests: Requests, law: CapacityProfile, num_engines: int) -> Answers:
    engines = Engines(requests, law, FOREVER)
    for _ in range(num_engines):
        engines.open(0.0)
    return engines.finish()


@pytest.mark.parametrize(
    ("changes", "num_engines", "rate"),
    [
        pytest.param({}, 1, 3.0, id="light"),
        pytest.param({}, 3, 40.0, id="three engines, busy"),
        pytest.param({"max_num_batched_tokens": 128}, 2, 8.0, id="prompts in many steps"),
        pytest.param({"max_num_seqs": 4}, 2, 30.0, id="too few slots"),
        pytest.param({"max_num_seqs": 8, "max_num_batched_tokens": 8}, 1, 1.0, id="no room"),
        pytest.param({}, 13, 130.0, id="many engines, of which one is drawn"),
        pytest.param({"max_num_seqs": 3}, 12, 140.0, id="many engines, some without a place"),
    ],
)
def test_engines_give_every_token_when_a_simulation_step_by_step_does(
    changes: dict[str, object], num_engines: int, rate: float
) -> None:
    law = profile(**changes)
    requests = varied(400, rate, seed=7)
    first_s, last_s = StepByStep(requests, law, num_engines).run()
    answers = run_engines(requests, law, num_engines)
    assert np.all(answers.status == kernel.SERVED)
    # Leaps multiply where steps add, and results are kept in single precision.
    np.testing.assert_allclose(answers.first_s, first_s - requests.arrival_s, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answers.last_s, last_s - requests.arrival_s, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "num_engines", "rate", "objectives"),
    [
        pytest.param({}, 2, 40.0, Objectives(1.0, 0.03), id="a little too much"),
        pytest.param({}, 3, 100.0, Objectives(1.0, 0.03, 0.0002), id="much too much"),
        pytest.param({}, 2, 60.0, Objectives(5.0, 0.015), id="hardly any sequences"),
        pytest.param({"max_num_batched_tokens": 512}, 3, 60.0, Objectives(2.0, 0.02), id="prompts"),
    ],
)
def test_places_and_turns_by_objectives_are_those_of_gateways_and_engines(
    changes: dict[str, object], num_engines: int, rate: float, objectives: Objectives
) -> None:
    law = profile(**changes)
    requests = varied(1500, rate, seed=11)
    world = StepByStep(requests, law, num_engines, objectives=objectives)
    first_s, last_s = world.run()
    engines = Engines(requests, law, FOREVER, objectives)
    for _ in range(num_engines):
        engines.open(0.0)
    answers = engines.finish()
    np.testing.assert_allclose(answers.first_s, first_s - requests.arrival_s, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answers.last_s, last_s - requests.arrival_s, rtol=1e-5, atol=1e-6)
    assert all(each.fewest_places < law.max_num_seqs for each in world.engines)
    assert (np.diff(first_s) < 0).any()  # some were overtaken


def test_engines_of_two_shapes_each_keep_to_their_own_law() -> None:
    small, large = profile(), profile(base_s=0.006, per_sequence_s=0.0002, max_num_seqs=80)
    requests = varied(400, 60.0, seed=9)
    first_s, last_s = StepByStep(requests, small, 2, others=[large]).run()
    engines = Engines(requests, small, FOREVER, others=[large])
    for law in (None, None, large):
        engines.open(0.0, law)
    answers = engines.finish()
    np.testing.assert_allclose(answers.first_s, first_s - requests.arrival_s, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(answers.last_s, last_s - requests.arrival_s, rtol=1e-5, atol=1e-6)


def test_engine_with_quicker_steps_is_sent_more_as_its_line_goes_faster() -> None:
    small, large = profile(), profile(base_s=0.006, per_sequence_s=0.0002, max_num_seqs=80)
    requests = steady(40.0, 60.0)
    engines = Engines(requests, small, FOREVER, OBJECTIVES, others=[large])
    slots = [engines.open(0.0, law) for law in (None, large)]
    engines.advance(60.0)
    work = engines.traffic(60.0).work
    assert work is not None
    few, many = (int(work.emitted[slot]) for slot in slots)
    lengths = 300.0, 60.0
    carries = [each.max_requests_per_s(*lengths, OBJECTIVES.tpot_s) for each in (small, large)]
    # Gateways choose as if they were alike: as many in flight, not as many as each could carry.
    assert 1.2 < many / few < carries[1] / carries[0]


@pytest.mark.parametrize("tokens", [128, 256])
def test_law_says_no_more_than_steps_have_room_for(tokens: int) -> None:
    """An engine whose steps are full of prompts does not do what their time would allow."""
    law = profile(max_num_batched_tokens=tokens, max_num_seqs=200)
    most = law.max_requests_per_s(300.0, 60.0, 10.0)
    assert most < profile(max_num_seqs=200).max_requests_per_s(300.0, 60.0, 10.0)

    def longest_wait_s(rate: float) -> float:
        num = 6000
        lengths = np.full(num, 300, np.int32), np.full(num, 60, np.int32)
        answers = run_engines(Requests(np.arange(num) / rate, *lengths), law, 1)
        return float(np.nanmax(answers.first_s))

    assert longest_wait_s(0.98 * most) < 3.0
    assert longest_wait_s(1.05 * most) > 8.0


def test_steady_load_runs_at_the_step_of_the_closed_form() -> None:
    # Evenly spaced: the form knows no chance. Poisson arrivals at this rate take 5 % longer steps.
    law, num = profile(), 24_000
    lengths = np.full(num, 300, np.int32), np.full(num, 60, np.int32)
    answers = run_engines(Requests(np.arange(num) / 12.0, *lengths), law, 1)
    tpot_s = (answers.last_s - answers.first_s) / 59
    assert tpot_s.mean() == pytest.approx(law.step_s(12.0, 300, 60), rel=0.02)


def test_first_token_alone_takes_one_step_with_the_prompt_and_the_floor() -> None:
    law = profile(ttft_floor_s=0.5)
    alone = Requests(np.array([5.0]), np.array([1000], np.int32), np.array([11], np.int32))
    answers = run_engines(alone, law, 1)
    first_s = 0.5 + 0.01 + 0.0004 + 1000 * 0.00004
    assert answers.first_s[0] == pytest.approx(first_s, abs=1e-6)
    assert answers.last_s[0] == pytest.approx(first_s + 10 * 0.0104, abs=1e-6)


def test_lost_engine_costs_the_step_and_the_prefill_of_what_was_given() -> None:
    law = profile()
    alone = Requests(np.array([0.0]), np.array([1000], np.int32), np.array([101], np.int32))
    engines = Engines(alone, law, FOREVER)
    first, second = engines.open(0.0), engines.open(0.0)
    step_s, first_s = 0.0104, 0.0504
    # In the middle of the step that would have given token 11.
    lost_s = first_s + 9.5 * step_s
    engines.close(first, lost_s)
    answers = engines.finish()
    resumed_s = lost_s + 0.0104 + (1000 + 10) * 0.00004
    assert answers.moves[0] == 1
    assert answers.first_s[0] == pytest.approx(first_s, abs=1e-6)
    assert answers.stall_s[0] == pytest.approx(resumed_s - lost_s, abs=1e-6)
    assert answers.last_s[0] == pytest.approx(resumed_s + 90 * step_s, abs=1e-5)
    assert second != first


def test_request_lost_before_its_first_token_starts_over() -> None:
    alone = Requests(np.array([0.0]), np.array([1000], np.int32), np.array([5], np.int32))
    engines = Engines(alone, profile(), FOREVER)
    slot = engines.open(0.0)
    engines.open(0.0)
    engines.close(slot, 0.03)
    answers = engines.finish()
    assert answers.first_s[0] == pytest.approx(0.03 + 0.0504, abs=1e-6)
    assert answers.stall_s[0] == 0


def test_draining_engine_keeps_what_will_finish_in_time_and_moves_the_rest() -> None:
    both = Requests(
        np.array([0.0, 0.0]), np.array([10, 10], np.int32), np.array([20, 2000], np.int32)
    )
    engines = Engines(both, profile(), FOREVER)
    leaving = engines.open(0.0)
    engines.advance(0.0)
    engines.open(0.1)
    engines.drain(leaving, 0.1)
    engines.leave(leaving, 0.1, stay_until_s=2.0)
    answers = engines.finish()
    assert answers.moves.tolist() == [0, 1]
    assert np.all(answers.status == kernel.SERVED)


def test_draining_engine_keeps_everything_while_there_is_no_other() -> None:
    one = Requests(np.array([0.0]), np.array([10], np.int32), np.array([500], np.int32))
    engines = Engines(one, profile(), FOREVER)
    slot = engines.open(0.0)
    engines.drain(slot, 1.0)
    engines.leave(slot, 1.0, stay_until_s=2.0)
    assert engines.traffic(1.0).num_in_flight == 1
    engines.close(slot, 3.0)
    assert engines.traffic(3.0).num_waiting == 1


def test_requests_without_an_engine_wait_in_order_and_fail_at_their_deadline() -> None:
    requests = Requests(
        np.array([0.0, 4.0, 8.0]), np.full(3, 10, np.int32), np.full(3, 5, np.int32)
    )
    engines = Engines(requests, profile(), GatewayLimits(request_deadline_s=10.0))
    assert engines.traffic(9.0).num_waiting == 3
    assert engines.traffic(9.0).oldest_wait_s == pytest.approx(9.0)
    engines.open(15.0)
    answers = engines.finish()
    assert answers.status.tolist() == [kernel.FAILED, kernel.FAILED, kernel.SERVED]
    assert answers.first_s[2] > 7.0


def test_gateway_that_is_full_refuses() -> None:
    requests = steady(rate=10.0, duration_s=5.0)
    engines = Engines(requests, profile(), GatewayLimits(60.0, max_waiting_requests=7))
    answers = engines.finish()
    assert np.count_nonzero(answers.status == kernel.FAILED) == 7
    assert np.count_nonzero(answers.status == kernel.REFUSED) == len(requests) - 7


def test_every_request_ends_once_while_engines_come_and_go() -> None:
    requests = varied(3000, rate=30.0, seed=11)
    engines = Engines(requests, profile(), GatewayLimits(5.0))
    rng = np.random.default_rng(4)
    slots: list[int] = []
    for now_s in np.arange(0.0, 120.0, 1.5):
        come_or_go(engines, slots, rng, now_s, most=30)
        seen = engines.traffic(now_s)
        assert engines.num_routable == len(slots)
        assert sum(engines.in_flight[slot] for slot in slots) == seen.num_in_flight
    answers = engines.finish()
    assert not np.any(answers.status == kernel.PENDING)
    is_served = answers.status == kernel.SERVED
    assert engines.traffic(1e9).num_finished == is_served.sum()
    assert np.all(answers.last_s[is_served] >= answers.first_s[is_served])
    assert answers.moves.sum() > 100
    # No stream gains a token faster than an engine alone could give it.
    fastest_s = (requests.output_tokens - 1) * 0.0104
    length_s = (answers.last_s - answers.first_s)[is_served]
    assert np.all(length_s - answers.stall_s[is_served] >= fastest_s[is_served] - 0.011 - 1e-4)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="request_deadline_s=0 must be positive"):
        GatewayLimits(request_deadline_s=0)
