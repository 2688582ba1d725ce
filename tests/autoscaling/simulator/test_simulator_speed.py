"""The size that the simulator has to bear. Says how long it took; asserts only that it ends."""

import resource
import time

import numpy as np
import pytest
from simulated_days import class_setup, profile

from autoscaling.records import Observation, Plan
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.arrivals import Requests, build_day
from autoscaling.simulator.world.spot_capacity import REGIMES, generate
from serving.domain.capacity.objectives import Objectives
from serving.domain.slice_lifecycle import SliceState

NUM_REQUESTS = 10_000_000
MOST_SLICES = 1000


INPUT_TOKENS, OUTPUT_TOKENS = 1200.0, 230.0
# A large model: a slice carries 0.26 requests/s at a TPOT of 90 ms, so that the day needs them all.
LAW = profile(base_s=0.03, per_sequence_s=0.006, per_prompt_token_s=0.001)


class Proportional:
    """Slices for the load of now at 70 % of what one can do; steady ones for missing spot ones."""

    name = "proportional"

    def decide(self, observation: Observation) -> Plan:
        load = observation.load
        one = LAW.max_requests_per_s(INPUT_TOKENS, OUTPUT_TOKENS, tpot_s=0.09)
        rate = load.requests_per_s if load is not None else 0.0
        wanted = min(MOST_SLICES, int(rate / one / 0.7) + 10)
        spot = observation.fleet.of_class("spot")
        num_ready = sum(view.state == SliceState.READY for view in spot)
        return Plan(observation.now_s, {"spot": wanted, "steady": max(0, wanted - num_ready)})


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_thousand_slices_a_day_and_ten_million_requests_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(1)
    hour = Requests(
        np.cumsum(rng.exponential(0.2, 18_000)),
        np.ceil(rng.lognormal(6.6, 1.0, 18_000)).astype(np.int32),
        np.ceil(rng.lognormal(5.1, 0.8, 18_000)).astype(np.int32),
    )
    began_s = time.perf_counter()
    day = build_day(hour, mean_rate=NUM_REQUESTS / 86_400, seed=1)
    built_s = time.perf_counter()
    setup = SimulationSetup(
        requests=day,
        profile=LAW,
        classes=(
            class_setup(
                capacity=generate(REGIMES["flapping"], MOST_SLICES, seed=2),
                max_slices=MOST_SLICES,
                losses_per_hour=0.05,
            ),
            class_setup("steady", max_slices=MOST_SLICES),
        ),
        objectives=Objectives(10.0, 0.1),
    )
    outcome = simulate(setup, Proportional())
    took_s = time.perf_counter() - built_s
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with capsys.disabled():
        print(  # noqa: T201  # the figures are what this test is for
            f"\n{len(day)} requests, {outcome.mean_slices:.0f} slices held: day built in"
            f" {built_s - began_s:.0f} s, simulated in {took_s:.0f} s, peak {peak_gib:.2f} GiB;"
            f" served {outcome.service.served_ratio:.4f}, moves {outcome.service.num_moves}"
        )
    assert outcome.service.num_requests == len(day) == NUM_REQUESTS
    assert outcome.service.num_served > 0.9 * NUM_REQUESTS
