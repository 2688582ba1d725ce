"""Lines of batches beside requests: on engines, and over a day under the production policy."""

import numpy as np
import pytest
from simulated_days import OBJECTIVES, class_setup, come_or_go, profile, varied
from step_by_step import StepByStep

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import Rules
from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import (
    Requests,
    SimulatedBatch,
    constant_lengths,
    draw_poisson,
    stages,
)
from autoscaling.simulator.world.engines import Engines, GatewayLimits

FOREVER = GatewayLimits(request_deadline_s=1e6, max_waiting_requests=1_000_000)
NOBODY = Requests(np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int32))
HOUR_S = 3600.0


def batch(lines: Requests, submitted_s: float = 0.0, window_s: float = HOUR_S) -> SimulatedBatch:
    return SimulatedBatch(submitted_s, window_s, lines)


def equal_lines(num: int, input_tokens: int = 300, output_tokens: int = 60) -> Requests:
    return Requests(
        np.zeros(num), np.full(num, input_tokens, np.int32), np.full(num, output_tokens, np.int32)
    )


@pytest.mark.parametrize(
    ("changes", "num_engines", "rate", "num_at_once"),
    [
        pytest.param({}, 1, 1.0, 1, id="one at once"),
        pytest.param({}, 3, 20.0, 12, id="three engines"),
        pytest.param({"max_num_seqs": 6}, 2, 8.0, 400, id="as many as there are places"),
        pytest.param({"max_num_batched_tokens": 128}, 2, 4.0, 6, id="prompts in many steps"),
    ],
)
def test_lines_and_requests_get_their_tokens_when_a_simulation_step_by_step_gives_them(
    changes: dict[str, object], num_engines: int, rate: float, num_at_once: int
) -> None:
    law, requests, lines = profile(**changes), varied(300, rate, seed=3), varied(200, 1.0, seed=5)
    first_s, last_s = StepByStep(requests, law, num_engines, lines, num_at_once).run()
    engines = Engines(requests, law, FOREVER, batches=[batch(lines)])
    for _ in range(num_engines):
        engines.open(0.0)
    engines.begin_batch(0, num_at_once, 0.0)
    seen = engines.finish()
    for answers, since_s, of in (
        (seen, requests.arrival_s, slice(0, 300)),
        (engines.line_answers(), 0.0, slice(300, None)),
    ):
        assert np.all(answers.status == kernel.SERVED)
        np.testing.assert_allclose(answers.first_s, first_s[of] - since_s, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(answers.last_s, last_s[of] - since_s, rtol=1e-5, atol=1e-6)
    assert engines.num_lines_left(0) == 0


def test_every_line_ends_once_while_engines_come_and_go() -> None:
    requests, lines = varied(2000, rate=20.0, seed=11), varied(1500, 1.0, seed=12)
    late = varied(300, 1.0, seed=13)
    engines = Engines(requests, profile(), GatewayLimits(5.0), None, [batch(lines), batch(late)])
    engines.begin_batch(0, 40, 0.0)
    rng = np.random.default_rng(4)
    slots: list[int] = []
    for now_s in np.arange(0.0, 150.0, 1.5):
        come_or_go(engines, slots, rng, now_s, most=12)
        if now_s == 60.0:
            engines.begin_batch(1, 20, now_s)
        limit = int(rng.integers(5, 60))
        engines.set_lines(0, limit, now_s)
        seen, counts = engines.traffic(now_s), engines.lines()
        num_on = [engines.num_lines_on_engines(0), engines.num_lines_on_engines(1)]
        assert sum(num_on) == counts.num_on_engines
        assert num_on[1] <= 20
        on_all = sum(engines.in_flight[slot] for slot in slots)
        assert on_all == seen.num_in_flight + counts.num_on_engines
        left = [engines.num_lines_left(0), engines.num_lines_left(1)]
        assert sum(left) + counts.num_finished == 1800
    engines.set_lines(0, 1000, 150.0)
    answers = engines.finish()
    of_lines = engines.line_answers()
    assert np.all(of_lines.status == kernel.SERVED)
    assert of_lines.moves.sum() > 100
    counts = engines.lines()
    assert (counts.num_on_engines, counts.num_finished) == (0, 1800)
    assert counts.output_tokens == lines.output_tokens.sum() + late.output_tokens.sum()
    assert counts.input_tokens == lines.input_tokens.sum() + late.input_tokens.sum()
    assert engines.traffic(1e9).num_finished == (answers.status == kernel.SERVED).sum()
    # No stream gains a token faster than an engine alone could give it.
    fastest_s = (lines.output_tokens - 1) * 0.0104
    length_s = (of_lines.last_s - of_lines.first_s - of_lines.stall_s)[:1500]
    assert np.all(length_s >= fastest_s - 0.011 - 1e-3)


def test_batch_that_is_over_keeps_what_it_has_and_begins_no_more() -> None:
    engines = Engines(NOBODY, profile(), FOREVER, batches=[batch(equal_lines(100))] * 2)
    engines.open(0.0)
    engines.begin_batch(0, 10, 0.0)
    engines.begin_batch(1, 3, 0.0)
    engines.end_batch(0, 0.5)
    assert engines.num_lines_left(0) == 10
    engines.finish()
    status = engines.line_answers().status
    assert np.count_nonzero(status[:100] == kernel.SERVED) == 10
    assert np.count_nonzero(status[:100] == kernel.FAILED) == 90
    assert np.all(status[100:] == kernel.SERVED)


def test_requests_do_not_feel_a_batch_without_lines_at_once() -> None:
    requests = varied(500, rate=20.0, seed=2)

    def answers(batches: list[SimulatedBatch]) -> tuple[np.ndarray, np.ndarray]:
        engines = Engines(requests, profile(), FOREVER, batches=batches)
        engines.open(0.0)
        if batches:
            engines.begin_batch(0, 0, 0.0)
        seen = engines.finish()
        return seen.first_s, seen.last_s

    for alone, beside in zip(answers([]), answers([batch(equal_lines(50))]), strict=True):
        np.testing.assert_array_equal(alone, beside)


def day(
    batches: tuple[SimulatedBatch, ...], rate: float = 40.0, duration_s: float = 2 * HOUR_S
) -> SimulationOutcome:
    """Two hours of steady requests on spot and on-demand, by the production policy."""
    spot = class_setup("spot", usd_per_slice_hour=2.0, max_slices=20)
    steady = class_setup("on-demand", usd_per_slice_hour=6.0, max_slices=20, is_revocable=False)
    law = profile()
    setup = SimulationSetup(
        requests=draw_poisson(stages((duration_s, rate)), constant_lengths(300, 60), 1),
        profile=law,
        classes=(spot, steady),
        objectives=OBJECTIVES,
        duration_s=duration_s,
        ready_at_start={"on-demand": 4},
        batches=batches,
    )
    terms = tuple(each.terms for each in setup.classes)
    return simulate(setup, SlicewisePolicy(law, terms, Rules(OBJECTIVES)))


@pytest.mark.slow
def test_batch_fits_beside_requests_and_they_are_served_as_before() -> None:
    alone = day(())
    beside = day((batch(equal_lines(15_000), 600.0, 1.5 * HOUR_S),))
    assert beside.batches.num_in_time == beside.batches.num_lines == 15_000
    assert beside.batches.num_kept == 1
    assert beside.service.slo_ratio >= alone.service.slo_ratio - 0.002
    assert beside.service.tpot_s[99] <= OBJECTIVES.tpot_s
    assert beside.service.num_served == alone.service.num_served


@pytest.mark.slow
def test_batch_that_needs_slices_gets_them_and_is_done_in_time() -> None:
    alone = day(())
    beside = day((batch(equal_lines(400_000), 600.0, 1.5 * HOUR_S),))
    assert beside.batches.num_in_time == 400_000
    assert beside.mean_slices > alone.mean_slices + 0.5
    assert beside.service.slo_ratio >= alone.service.slo_ratio - 0.002
    # Its slices are spot, and are given back.
    assert beside.cost.usd_by_class["on-demand"] <= alone.cost.usd_by_class["on-demand"] * 1.05
    assert beside.timeline.num_held[-1] <= alone.timeline.num_held[-1] + 1


@pytest.mark.slow
def test_what_no_fleet_could_do_in_time_is_said() -> None:
    outcome = day((batch(equal_lines(400_000), 600.0, 300.0),))
    assert 0 < outcome.batches.num_in_time < 400_000
    assert outcome.batches.num_kept == 0
