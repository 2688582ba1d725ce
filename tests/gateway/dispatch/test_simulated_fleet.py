"""Whole fleets in simulated time, with real links between them: what late binding gains and costs.

Figures are of the simulation and so exact: nothing here measures this machine.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.dispatch_loads import BUSY
from benchmarks.dispatch_loads import send as send_load
from benchmarks.dispatch_trace import choosing_fleet
from serving.domain.tokens.paced import paced_token
from serving.domain.usage.tenant_shares import OUTPUT_WEIGHT
from tests.gateway.dispatch.floods import (
    APART,
    AT_ANY,
    AT_ONE,
    BOUNDED,
    WEIGHTS,
    Doors,
    beside_a_flood,
)
from tests.gateway.dispatch.simulated_fleet import (
    CHIP,
    CHIP_WITH_CACHE,
    Answer,
    SimulatedFleet,
    engines_of,
    prompt_of,
    quantile,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import LATENCY_S, run_on_network

pytestmark = pytest.mark.slow


async def send(
    fleet: SimulatedFleet,
    seed: random.Random,
    num_requests: int,
    requests_per_s: float,
    prompt_tokens: Callable[[], int],
    output_tokens: Callable[[], int],
) -> None:
    """Sends requests at a rate, each to some gateway, and waits for all answers."""
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    for number in range(num_requests):
        at_s += seed.expovariate(requests_per_s)
        await asyncio.sleep(at_s - loop.time())
        gateway = seed.choice(fleet.gateways)
        gateway.submit(f"r{number}", prompt_of(prompt_tokens(), seed), output_tokens())
    await fleet.until_done()
    assert not any(gateway.failures for gateway in fleet.gateways)


def answered(
    num_gateways: int,
    num_engines: int,
    requests_per_s: float,
    prompt_tokens: int,
    output_tokens: int,
    *,
    told: bool,
) -> list[Answer]:
    """Returns the answers to 600 requests, with lengths spread around the given ones."""
    answers: list[Answer] = []

    async def main() -> None:
        seed = random.Random(23)
        engines = engines_of(CHIP, num_engines, told=told)
        async with simulated_fleet(num_gateways, engines) as fleet:
            await send(
                fleet,
                seed,
                600,
                requests_per_s,
                lambda: min(30_000, 16 + int(seed.lognormvariate(-0.5, 1) * prompt_tokens)),
                lambda: 1 + int(seed.expovariate(1 / output_tokens)),
            )
            answers.extend(fleet.answers)

    run_on_network(main())
    return answers


@pytest.mark.parametrize(
    ("num_requests", "prompt_tokens", "output_tokens"),
    [pytest.param(1000, 500, 150, id="decode"), pytest.param(400, 8000, 20, id="prefill")],
)
def test_engines_never_starve_while_requests_wait(
    num_requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    """All are alike and come within a second: all are done as early as where engines have a line.

    From a place that is free to the request that takes it are half a millisecond and a step.
    """

    def done_s(*, told: bool) -> float:
        ends: list[float] = []

        async def main() -> None:
            async with simulated_fleet(4, engines_of(CHIP, 4, told=told)) as fleet:
                lengths = (lambda: prompt_tokens), (lambda: output_tokens)
                await send(fleet, random.Random(1), num_requests, 1000.0, *lengths)
                ends.extend(each.ended_at_s or 0.0 for each in fleet.answers)

        run_on_network(main())
        return max(ends)

    assert done_s(told=True) < 1.015 * done_s(told=False)


def test_prompts_find_the_shortest_line_though_gateways_know_only_their_own() -> None:
    """At two thirds of what the fleet can do, the slowest tenth of first tokens is faster."""
    load = (4, 8, 25.0, 4000, 100)
    told = [answer.ttft_s for answer in answered(*load, told=True)]
    before = [answer.ttft_s for answer in answered(*load, told=False)]
    assert quantile(told, 0.9) < 0.95 * quantile(before, 0.9)


def test_an_engine_that_comes_takes_its_share_of_two_thousand_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        first, second = engines_of(CHIP, 2)
        async with simulated_fleet(1, [first]) as fleet:
            (gateway,) = fleet.gateways
            seed = random.Random(5)
            for number in range(2000):
                gateway.submit(f"r{number}", prompt_of(100, seed), 50)
            await asyncio.sleep(0.5)
            assert gateway.dispatcher.num_waiting > 1800
            await fleet.add_engine(second)
            linked_at_s = loop.time()
            (old, new) = gateway.dispatcher.connections
            given_before = old.num_dispatched
            while not new.requests:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(LATENCY_S)
            names = [request.request_id for request in new.requests.values()]
            given_at_s = loop.time()
            # It hears of room and sends: two ways. All that it may have in a step goes at once.
            assert given_at_s - linked_at_s <= 3 * LATENCY_S
            assert len(names) == CHIP.max_num_seqs
            while not any(gateway.answers[name].num_tokens for name in names):  # noqa: ASYNC110
                await asyncio.sleep(LATENCY_S)
            # One step: its prompts of 6,400 tokens and the tokens of all that are in it.
            step_s = 0.012 + 64 * 0.0002 + 6400 / 20_000
            assert loop.time() - given_at_s <= step_s + 4 * LATENCY_S
            await asyncio.sleep(10.0)
            given = old.num_dispatched - given_before, new.num_dispatched
            assert min(given) > 100
            assert abs(given[0] - given[1]) <= CHIP.max_num_seqs
            await fleet.until_done()
            assert not gateway.failures

    run_on_network(main())


def work_by_tenant(fleet: SimulatedFleet) -> dict[str, float]:
    """The work that has been done by now: prompts that have begun, and tokens that are out."""
    work = dict.fromkeys(WEIGHTS, 0.0)
    for answer in fleet.answers:
        if answer.num_tokens:
            work[answer.tenant] += answer.prompt_tokens + OUTPUT_WEIGHT * answer.num_tokens
    return work


# Each at its own gateway knows least of the others.
LONG_BUT_APART = pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in (AT_ONE, AT_ANY)), APART]
)


@pytest.mark.parametrize("kind", [pytest.param(AT_ONE, marks=pytest.mark.long), AT_ANY, APART])
def test_tenants_that_all_wait_share_by_their_weights(kind: str) -> None:
    """Over a minute, wherever they ask, with lengths of all kinds."""

    async def main() -> None:
        seed = random.Random(3)
        async with simulated_fleet(Doors.count(kind), engines_of(CHIP, 2)) as fleet:
            doors = Doors(kind, fleet, seed)
            for number in range(3600):
                tenant = list(WEIGHTS)[number % 3]
                prompt = prompt_of(16 + int(seed.lognormvariate(6.0, 1.0)), seed)
                length = 1 + int(seed.expovariate(1 / 120))
                asked = {"tenant": tenant, "weight": WEIGHTS[tenant]}
                doors.of(tenant).submit(f"r{number}", prompt, length, **asked)
            await asyncio.sleep(10.0)
            before = work_by_tenant(fleet)
            await asyncio.sleep(60.0)
            after = work_by_tenant(fleet)
            waiting = {answer.tenant for answer in fleet.answers if not answer.num_tokens}
            assert waiting == set(WEIGHTS)
            work = {tenant: after[tenant] - before[tenant] for tenant in WEIGHTS}
            for tenant, weight in WEIGHTS.items():
                assert work[tenant] / sum(work.values()) == pytest.approx(weight / 10, rel=0.03)

    run_on_network(main())


@LONG_BUT_APART
def test_a_flood_waits_in_its_own_line(kind: str) -> None:
    """Steps are longer beside it, and so are the first tokens of all; nobody waits in its line."""
    others, flood = beside_a_flood(kind, 500)
    assert quantile(others, 0.5) < 0.1
    assert quantile(others, 0.99) < 0.2
    assert quantile(flood, 0.5) > 10.0


@LONG_BUT_APART
def test_a_flood_of_long_prompts_is_in_front_of_others_by_a_step_or_two(kind: str) -> None:
    """A prompt of theirs takes 0.2 s of a step, and one is in nearly every step."""
    others, _ = beside_a_flood(kind, 4000)
    assert quantile(others, 0.5) < 0.5
    assert quantile(others, 0.99) < 1.2


@LONG_BUT_APART
def test_a_flood_of_long_prompts_is_before_nobody_where_steps_bound_each(kind: str) -> None:
    """So they are as one of prompts of 500 tokens: others begin in the step that comes next."""
    others, flood = beside_a_flood(kind, 4000, engine=BOUNDED)
    assert quantile(others, 0.5) < 0.12
    assert quantile(others, 0.99) < 0.2
    assert quantile(flood, 0.5) > 10.0


def test_sixteen_gateways_load_engines_alike() -> None:
    """Each engine has about as much to do, though no gateway sees more than a sixteenth."""

    async def main() -> None:
        seed = random.Random(7)
        async with simulated_fleet(16, engines_of(CHIP, 8)) as fleet:
            busiest: list[float] = []

            async def look() -> None:
                while True:
                    await asyncio.sleep(0.5)
                    running = [engine.load.num_running for engine in fleet.engines]
                    if min(running) >= 20:
                        busiest.append(max(running) / (sum(running) / len(running)))

            looking = asyncio.create_task(look())
            await send(fleet, seed, 1500, 100.0, lambda: 400, lambda: 150)
            looking.cancel()
            assert len(busiest) > 10
            assert sum(busiest) / len(busiest) < 1.15

    run_on_network(main())


def agents(num_gateways: int, *, told: bool = True) -> tuple[float, float, tuple[int, int, int]]:
    """Returns the slowest tenth's first token, the share of prompts that was cached, the forecast.

    Forty agents with instructions of 6,000 tokens each, of which an engine's cache has room for
    less than half, ask a little more each.
    """
    found: list[tuple[float, float, tuple[int, int, int]]] = []

    async def main() -> None:
        seed = random.Random(9)
        instructions = [prompt_of(6000, seed) for _ in range(40)]
        async with simulated_fleet(
            num_gateways, engines_of(CHIP_WITH_CACHE, 4, told=told)
        ) as fleet:
            loop = asyncio.get_running_loop()
            at_s = loop.time()
            for number in range(800):
                at_s += seed.expovariate(20.0)
                await asyncio.sleep(at_s - loop.time())
                prompt = [*seed.choice(instructions), *prompt_of(400, seed)]
                seed.choice(fleet.gateways).submit(f"r{number}", prompt, 30)
            await fleet.until_done()
            waits = [each.ttft_s for each in fleet.answers]
            found.append((quantile(waits, 0.9), fleet.cached_ratio, fleet.forecast()))

    run_on_network(main())
    return found[0]


def test_agents_find_their_instructions_through_any_number_of_gateways() -> None:
    one_s, one_cached, _ = agents(1)
    many_s, many_cached, (as_expected, missing, unforeseen) = agents(8)
    blind_s, blind_cached, of_blind = agents(8, told=False)
    # Blocks go while a prompt is in line, and others come; blocks of less than 128 tokens are not
    # told. Who knows nothing of caches expects nothing.
    assert missing < 0.01 * as_expected
    assert unforeseen < 0.03 * as_expected
    assert of_blind == (0, 0, 0)
    assert many_s < 1.3 * one_s
    assert min(one_cached, many_cached) > 0.75
    assert blind_cached < 0.5
    assert many_s < 0.3 * blind_s


def test_a_beginning_in_line_is_not_computed_again_for_another_gateway() -> None:
    """Both engines compute something else meanwhile, so that no cache has it yet."""
    chance = random.Random(4)
    begin = prompt_of(6000, chance)

    async def main() -> None:
        async with simulated_fleet(2, engines_of(CHIP_WITH_CACHE, 2)) as fleet:
            for name in ("other", "another"):
                fleet.gateways[0].submit(name, prompt_of(3000, chance), 5)
            await asyncio.sleep(0.02)
            fleet.gateways[0].submit("first", begin + [1] * 100, 5)
            await asyncio.sleep(0.06)
            assert [engine.load.num_waiting for engine in fleet.engines] in ([0, 1], [1, 0])
            fleet.gateways[1].submit("second", begin + [2] * 100, 5)
            await fleet.until_done()
            assert fleet.gateways[1].answers["second"].num_cached >= 5900

    run_on_network(main())


def test_what_all_begin_with_comes_onto_all_engines() -> None:
    """Each request by itself has its first token soonest where the beginning is already."""
    chance = random.Random(6)
    begin = prompt_of(6000, chance)

    async def main() -> None:
        async with simulated_fleet(2, engines_of(CHIP_WITH_CACHE, 3)) as fleet:
            for number in range(400):
                await asyncio.sleep(chance.expovariate(20.0))
                prompt = begin + prompt_of(100, chance)
                chance.choice(fleet.gateways).submit(f"r{number}", prompt, 30)
            await fleet.until_done()
            taken = [engine.engine_stats.generation_tokens for engine in fleet.engines]
            assert min(taken) > 0.2 * sum(taken)
            assert fleet.cached_ratio > 0.95

    run_on_network(main())


def test_busy_engines_do_not_go_on_giving_up_each_others_beginnings() -> None:
    """After the first seconds, in which all are computed, none is."""
    load = replace(BUSY, num_requests=1000)
    late: list[Answer] = []

    async def main() -> None:
        building = choosing_fleet("room and cache", 16, load.num_engines, load.engine)
        async with building as (fleet, gateways):
            began_s = asyncio.get_running_loop().time()
            await send_load(load, gateways)
            await fleet.until_done()
            late.extend(each for each in fleet.answers if each.came_at_s > began_s + 7)

    run_on_network(main())
    assert len(late) > 200
    computed = [each for each in late if each.num_cached < load.shared_tokens - 100]
    assert len(computed) <= 0.02 * len(late)


def test_answers_are_whole() -> None:
    async def main() -> None:
        seed = random.Random(11)
        async with simulated_fleet(2, engines_of(CHIP, 2)) as fleet:
            prompts = {f"p{number}": prompt_of(300, seed) for number in range(300)}
            for number, (name, prompt) in enumerate(prompts.items()):
                fleet.gateways[number % 2].submit(name, prompt, 5)
            await fleet.until_done()
            for gateway in fleet.gateways:
                assert all(answer.num_tokens == 5 for answer in gateway.answers.values())
            assert paced_token(prompts["p0"], 0, CHIP.token_range)

    run_on_network(main())
