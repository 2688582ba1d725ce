"""One of several engines is slow or stands still, in simulated time: what its requests wait for."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from serving.engine.paced.engine import PacedEngine
from tests.gateway.dispatch.simulated_fleet import CHIP, SimulatedFleet, quantile, simulated_fleet
from tests.gateway.dispatch.simulated_network import run_on_network

NUM_ENGINES = 4
RUN_S = 45.0
# About what one engine does of these requests.
ONE_ENGINE_PER_S = 13.0
STALL_S = 20.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds to the first token, of all requests; tokens of answers; requests that moved."""

    median_s: float
    p99_s: float
    longest_s: float
    num_tokens: int
    num_moved: int


def load(
    share: float,
    num_gateways: int = 1,
    slow: int = 1,
    disturb: Callable[[SimulatedFleet], None] | None = None,
) -> Seen:
    """Returns what is seen at a share of what four engines do, one of them `slow` times so slow.

    After a third of the time it is disturbed.
    """
    found: list[Seen] = []
    slowed = replace(
        CHIP,
        time_per_token_s=CHIP.time_per_token_s * slow,
        tpot_per_seq_s=CHIP.tpot_per_seq_s * slow,
        prefill_tokens_per_s=CHIP.prefill_tokens_per_s / slow,
    )

    async def main() -> None:
        seed = random.Random(5)
        loop = asyncio.get_running_loop()
        engines = [PacedEngine(slowed), *(PacedEngine(CHIP) for _ in range(NUM_ENGINES - 1))]
        async with simulated_fleet(num_gateways, engines) as fleet:
            if disturb is not None:
                loop.call_later(RUN_S / 3, disturb, fleet)
            at_s, number = loop.time(), 0
            while at_s < RUN_S:
                at_s += seed.expovariate(share * NUM_ENGINES * ONE_ENGINE_PER_S)
                await asyncio.sleep(at_s - loop.time())
                length = 16 + int(seed.lognormvariate(6.0, 1.0))
                # Each has a prompt of its own, by which the engine of the simulation knows it.
                prompt = [number // 256 % 256, number % 256] + [number % 251] * length
                gateway = seed.choice(fleet.gateways)
                gateway.submit(f"r{number}", prompt, 1 + int(seed.expovariate(1 / 120)))
                number += 1
            await fleet.until_done()
            waits_s = [answer.ttft_s for answer in fleet.answers]
            num_tokens = sum(answer.num_tokens for answer in fleet.answers)
            found.append(
                Seen(
                    quantile(waits_s, 0.5),
                    quantile(waits_s, 0.99),
                    max(waits_s),
                    num_tokens,
                    num_moves(fleet),
                )
            )

    run_on_network(main())
    return found[0]


def num_moves(fleet: SimulatedFleet) -> int:
    return sum(
        numbers.resumes["slow"]
        for gateway in fleet.gateways
        for numbers in gateway.dispatcher.telemetry.metrics.classes.values()
    )


def stall(fleet: SimulatedFleet) -> None:
    fleet.engines[0].stall_for(STALL_S)


@pytest.mark.slow
@pytest.mark.parametrize("num_gateways", [1, 4])
def test_what_an_engine_does_not_begin_is_begun_by_another(num_gateways: int) -> None:
    seen = load(0.3, num_gateways, disturb=stall)
    # Without it 19.8 s: its requests wait until it goes on.
    assert seen.longest_s < 4.0
    assert 0 < seen.num_moved <= 24


@pytest.mark.slow
@pytest.mark.parametrize(("share", "slow"), [(0.9, 1), (0.6, 3)])
def test_nothing_moves_from_engines_that_turn(share: float, slow: int) -> None:
    assert load(share, slow=slow).num_moved == 0
