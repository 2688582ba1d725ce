"""A model has objectives and too few engines, in simulated time: how many are within them."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from serving.domain.capacity.objectives import Objectives
from tests.gateway.dispatch.simulated_fleet import (
    CHIP,
    Answer,
    SimulatedFleet,
    engines_of,
    prompt_of,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import run_on_network

pytestmark = pytest.mark.slow

# Steps of a full engine take 38 ms, with prompts. Engines keep this with 26 sequences each, and
# answer two thirds as many as they could.
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.025)
DEADLINE_S, RUN_S = 60.0, 120.0
# What two engines answer within the objectives, of these requests.
TWO_ENGINES_PER_S = 19.0


@dataclass(slots=True)
class Service:
    """What became of those that came: the shares of them, and the longest time to first token."""

    in_objectives: float
    late: float  # let in, and then without a place in time
    refused: float
    longest_wait_s: float


def is_kept(answer: Answer) -> bool:
    if answer.ended_at_s is None or answer.first_at_s is None or answer.ttft_s > OBJECTIVES.ttft_s:
        return False
    later_s = answer.ended_at_s - answer.first_at_s
    return later_s <= OBJECTIVES.tpot_s * (answer.num_tokens - 1)


async def ask(fleet: SimulatedFleet, per_s: float, run_s: float) -> None:
    seed = random.Random(23)
    loop = asyncio.get_running_loop()
    at_s = began_s = loop.time()
    number = 0
    while at_s < began_s + run_s:
        at_s += seed.expovariate(per_s)
        await asyncio.sleep(at_s - loop.time())
        prompt, length = prompt_of(500, seed), 1 + int(seed.expovariate(1 / 120))
        seed.choice(fleet.gateways).submit(f"r{number}", prompt, length)
        number += 1


async def most_new_on_an_engine(fleet: SimulatedFleet, for_s: float) -> int:
    """Returns the most requests that one had at once which had no engine before."""
    loop = asyncio.get_running_loop()
    most, until_s = 0, loop.time() + for_s
    while loop.time() < until_s:
        new = Counter(
            connection.engine_id
            for gateway in fleet.gateways
            for connection in gateway.dispatcher.connections
            for request in connection.requests.values()
            if not request.attempt
        )
        most = max(most, *new.values())
        await asyncio.sleep(0.01)
    return most


@pytest.mark.parametrize("num_gateways", [1, 4])
def test_places_of_what_lost_its_engine_are_not_given_to_newcomers(num_gateways: int) -> None:
    """A stream that goes on may have one beyond the bound, whoever comes first may not."""

    async def main() -> None:
        engines = engines_of(CHIP, 4)
        async with simulated_fleet(
            num_gateways, engines, DEADLINE_S, objectives=OBJECTIVES
        ) as fleet:
            asking = asyncio.create_task(ask(fleet, 1.3 * 2 * TWO_ENGINES_PER_S, 25.0))
            await asyncio.sleep(15.0)
            before = await most_new_on_an_engine(fleet, 5.0)
            await fleet.lose_engine(3)
            after = await most_new_on_an_engine(fleet, 3.0)
            await asking
            await fleet.until_done()
        assert sum(each.pause_s is not None for each in fleet.answers) > 10, "many went on"
        assert after <= before + 2 * num_gateways

    run_on_network(main())


def service(
    num_gateways: int, load: float, *, has_objectives: bool, run_s: float = RUN_S
) -> Service:
    """Returns how it is with `load` times what two engines do within the objectives."""
    found: list[Service] = []

    async def main() -> None:
        objectives = OBJECTIVES if has_objectives else None
        engines = engines_of(CHIP, 2)
        async with simulated_fleet(
            num_gateways, engines, DEADLINE_S, objectives=objectives
        ) as fleet:
            await ask(fleet, load * TWO_ENGINES_PER_S, run_s)
            await fleet.until_done()
            errors = [each for gateway in fleet.gateways for each in gateway.failures.values()]
            late = sum(getattr(each, "code", "") == "no_room_in_time" for each in errors)
            found.append(
                Service(
                    sum(map(is_kept, fleet.answers)) / len(fleet.answers),
                    late / len(fleet.answers),
                    (len(errors) - late) / len(fleet.answers),
                    max(each.ttft_s for each in fleet.answers if each.first_at_s is not None),
                )
            )

    run_on_network(main())
    return found[0]


@pytest.mark.parametrize(
    ("num_gateways", "run_s"), [(1, 60.0), pytest.param(4, RUN_S, marks=pytest.mark.long)]
)
def test_with_too_few_engines_about_as_many_as_can_be_are_served_within_the_objectives(
    num_gateways: int, run_s: float
) -> None:
    """Three quarters of the work is for those that can be in time."""
    held = service(num_gateways, 1.3, has_objectives=True, run_s=run_s)
    not_held = service(num_gateways, 1.3, has_objectives=False, run_s=run_s)
    assert not_held.in_objectives < 0.15
    assert held.in_objectives > 0.45
    assert held.in_objectives < 1 / 1.3
    # Nobody who was let in waited in vain, and nobody for longer than was said.
    assert held.late == 0
    assert held.longest_wait_s < DEADLINE_S
    # What no engine does in time is refused at once: about what is too much.
    assert held.refused < 0.3


@pytest.mark.parametrize(
    ("num_gateways", "run_s"), [(1, 60.0), pytest.param(4, RUN_S, marks=pytest.mark.long)]
)
def test_with_enough_engines_objectives_change_nothing(num_gateways: int, run_s: float) -> None:
    held = service(num_gateways, 0.8, has_objectives=True, run_s=run_s)
    not_held = service(num_gateways, 0.8, has_objectives=False, run_s=run_s)
    assert (held.refused, held.late) == (0, 0)
    assert held.in_objectives > not_held.in_objectives - 0.02
    assert held.longest_wait_s < OBJECTIVES.ttft_s
