"""A tenant that floods a simulated fleet, and two others, at one gateway or at several."""

import asyncio
import random
from dataclasses import replace

from serving.engine.paced.config import PacedConfig
from tests.gateway.dispatch.simulated_fleet import (
    CHIP,
    SimulatedFleet,
    SimulatedGateway,
    engines_of,
    prompt_of,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import run_on_network

WEIGHTS = {"five": 5.0, "three": 3.0, "two": 2.0}
# Where tenants ask: all at one gateway, any of four for each request, or each at its own of four.
AT_ONE, AT_ANY, APART = "at one gateway", "at any of four", "each at its own of four"

# Its steps compute no more of a prompt while there are others, or a request's share of the step.
BOUNDED = replace(
    CHIP, long_prefill_token_threshold=512, long_prefill_token_threshold_adaptive=True
)


class Doors:
    """The gateways at which tenants ask."""

    def __init__(self, kind: str, fleet: SimulatedFleet, seed: random.Random) -> None:
        self.kind, self.gateways, self.seed = kind, fleet.gateways, seed

    def of(self, tenant: str) -> SimulatedGateway:
        if self.kind == AT_ANY:
            return self.seed.choice(self.gateways)
        return self.gateways[list(WEIGHTS).index(tenant) if self.kind == APART else 0]

    @staticmethod
    def count(kind: str) -> int:
        return 1 if kind == AT_ONE else 4


def beside_a_flood(
    kind: str,
    flood_tokens: int | None,
    seed: int = 4,
    *,
    knows_tenants: bool = True,
    num_requests: int = 200,
    engine: PacedConfig = CHIP,
) -> tuple[list[float], list[float]]:
    """Returns the times of first tokens of two tenants, and of another that floods.

    The two ask for a third of the fleet together, the other for several times all of it, with
    prompts of `flood_tokens`, or nothing if that is `None`; until they come it has all of it. Where
    nobody `knows_tenants`, who comes first is served first.
    """
    others: list[float] = []
    flood: list[float] = []

    async def main() -> None:
        chance = random.Random(seed)
        loop = asyncio.get_running_loop()
        async with simulated_fleet(Doors.count(kind), engines_of(engine, 2)) as fleet:
            doors = Doors(kind, fleet, chance)
            at_s = loop.time()
            for number in range(num_requests):
                at_s += chance.expovariate(8.0)
                await asyncio.sleep(at_s - loop.time())
                tenant = chance.choice(["three", "two"])
                lengths = prompt_of(500, chance), 1 + int(chance.expovariate(1 / 100))
                asked = {"tenant": tenant, "weight": WEIGHTS[tenant]} if knows_tenants else {}
                doors.of(tenant).submit(f"r{number}", *lengths, **asked)
                for extra in range(10 if flood_tokens else 0):
                    prompt = prompt_of(flood_tokens, chance)
                    asked = {"tenant": "five", "weight": WEIGHTS["five"]} if knows_tenants else {}
                    doors.of("five").submit(f"f{number}-{extra}", prompt, 100, **asked)
            await fleet.until_done()
            for gateway in fleet.gateways:
                for name, answer in gateway.answers.items():
                    if answer.came_at_s > 5.0:
                        (flood if name.startswith("f") else others).append(answer.ttft_s)

    run_on_network(main())
    return others, flood
