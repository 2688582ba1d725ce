"""More is asked than a fleet can do, in simulated time: who is refused, and if that was true."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from serving.domain.errors import OverloadedError
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from tests.gateway.dispatch.floods import WEIGHTS
from tests.gateway.dispatch.simulated_fleet import (
    CHIP,
    SimulatedFleet,
    engines_of,
    prompt_of,
    quantile,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import run_on_network

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0
RUN_S = 90.0
# About what one engine does of these requests.
ONE_ENGINE_PER_S = 13.0
FOREVER_S = 86_400.0


@dataclass(slots=True)
class Visits:
    """What became of clients who come back once if they are told to, with the same request."""

    num_told: int = 0
    num_back: int = 0
    num_back_served: int = 0
    num_let_in: int = 0
    num_late: int = 0  # let in, and then without a place in time
    tokens: int = 0  # of answers that were whole when the last client had come


async def visit(
    fleet: SimulatedFleet, seed: random.Random, name: str, visits: Visits, *, stays: bool
) -> None:
    """Comes once, and once more when told: to the same gateway if it `stays`, else to any."""
    gateway = seed.choice(fleet.gateways)
    tenant = seed.choice(list(WEIGHTS))
    prompt = prompt_of(16 + int(seed.lognormvariate(6.0, 1.0)), seed)
    length = 1 + int(seed.expovariate(1 / 120))
    for attempt in ("first", "back"):
        request_id = f"{name} {attempt}"
        if attempt == "back" and not stays:
            gateway = seed.choice(fleet.gateways)
        gateway.submit(request_id, prompt, length, tenant=tenant, weight=WEIGHTS[tenant])
        error = gateway.failures.get(request_id)
        if not isinstance(error, OverloadedError):
            return
        if attempt == "first":
            visits.num_told += 1
            # Headers have whole seconds, rounded up, and clients are a little late.
            await asyncio.sleep(int(error.retry_after_s or 0.0) + 1 + seed.uniform(0.0, 1.0))


def overload(
    num_gateways: int, deadline_s: float, number: int = 17, *, stays: bool = True
) -> Visits:
    """Returns what becomes of half as much again as two engines can do."""
    visits = Visits()

    async def main() -> None:
        seed = random.Random(number)
        loop = asyncio.get_running_loop()
        async with simulated_fleet(num_gateways, engines_of(CHIP, 2), deadline_s) as fleet:
            coming: list[asyncio.Task[None]] = []
            at_s = loop.time()
            while at_s < RUN_S:
                at_s += seed.expovariate(1.5 * 2 * ONE_ENGINE_PER_S)
                await asyncio.sleep(at_s - loop.time())
                client = visit(fleet, seed, f"r{len(coming)}", visits, stays=stays)
                coming.append(asyncio.create_task(client))
            await asyncio.gather(*coming)
            await fleet.until_done()
            for gateway in fleet.gateways:
                late = {name for name, error in gateway.failures.items() if is_late(error)}
                told = gateway.failures.keys() - late
                visits.num_late += len(late)
                visits.num_let_in += len(gateway.answers) - len(told)
                back = {name for name in gateway.answers if name.endswith("back")}
                visits.num_back += len(back)
                visits.num_back_served += len(back - gateway.failures.keys())
            for answer in fleet.answers:
                visits.tokens += answer.num_tokens * ((answer.ended_at_s or FOREVER_S) <= RUN_S)

    run_on_network(main())
    return visits


def is_late(error: Exception) -> bool:
    return getattr(error, "code", "") == "no_room_in_time"


@pytest.mark.parametrize("num_gateways", [pytest.param(1, marks=pytest.mark.long), 4])
def test_who_comes_back_when_told_is_served(num_gateways: int) -> None:
    """Three tenants of unequal shares ask for half as much again as there is."""
    visits = overload(num_gateways, DEADLINE_S)
    assert visits.num_told > 300
    assert visits.num_back == visits.num_told
    assert visits.num_back_served >= 0.95 * visits.num_back
    assert visits.num_late <= 0.01 * visits.num_let_in
    # The engines had as much to do as if nobody had been refused.
    assert visits.tokens > 0.96 * overload(num_gateways, FOREVER_S).tokens


def test_who_comes_back_to_another_gateway_is_mostly_served() -> None:
    """That one knows of no promise, and takes it for a newcomer."""
    visits = overload(4, DEADLINE_S, stays=False)
    assert visits.num_told > 300
    assert visits.num_back_served >= 0.8 * visits.num_back
    # Who is let in is served all the same.
    assert visits.num_late <= 0.01 * visits.num_let_in


@pytest.mark.parametrize("num_gateways", [pytest.param(1, marks=pytest.mark.long), 2])
def test_interactive_work_does_not_see_batch_work(num_gateways: int) -> None:
    """Batch work that would fill the fleet many times waits; what else comes does not.

    With two gateways all of the batch work is at one, and all else at the other.
    """

    def waits(*, has_batch: bool) -> list[float]:
        found: list[float] = []

        async def main() -> None:
            seed = random.Random(4)
            loop = asyncio.get_running_loop()
            async with simulated_fleet(num_gateways, engines_of(CHIP, 2)) as fleet:
                gateway, for_batch = fleet.gateways[0], fleet.gateways[-1]
                at_s = loop.time()
                for number in range(400):
                    at_s += seed.expovariate(8.0)
                    await asyncio.sleep(at_s - loop.time())
                    prompt, length = prompt_of(500, seed), 1 + int(seed.expovariate(1 / 100))
                    kind = ServiceClass(number % 2)
                    gateway.submit(f"r{number}", prompt, length, service_class=kind)
                    for extra in range(6 if has_batch else 0):
                        name, prompt = f"b{number}-{extra}", prompt_of(500, seed)
                        for_batch.submit(name, prompt, 100, service_class=ServiceClass.BATCH)
                await fleet.until_done()
                assert not gateway.failures | for_batch.failures
                answers = gateway.answers | for_batch.answers
                of = {kind: [answers[name] for name in answers if name[0] == kind] for kind in "rb"}
                found.extend(each.ttft_s for each in of["r"])
                batch = of["b"]
                assert all(each.num_tokens == 100 for each in batch)
                assert not has_batch or quantile([each.ttft_s for each in batch], 0.5) > 10.0

        run_on_network(main())
        return found

    alone, beside = waits(has_batch=False), waits(has_batch=True)
    # Steps are longer beside it: no more.
    assert quantile(beside, 0.5) < 2.0 * quantile(alone, 0.5)
    assert quantile(beside, 0.99) < 3.0 * quantile(alone, 0.99)


@pytest.mark.parametrize("num_gateways", [1, 2])
def test_engines_full_of_batch_work_have_room_for_what_cannot_wait(num_gateways: int) -> None:
    """Nobody else has come for a while, so no room was kept; each answer takes half a minute.

    With two gateways all of the batch work is at one, and all else at the other.
    """

    async def main() -> None:
        seed = random.Random(6)
        async with simulated_fleet(num_gateways, engines_of(CHIP, 2)) as fleet:
            for_batch, gateway = fleet.gateways[0], fleet.gateways[-1]
            for number in range(160):
                prompt = prompt_of(500, seed)
                batch = ServiceClass.BATCH
                for_batch.submit(f"b{number}", prompt, 1200, service_class=batch)
            await asyncio.sleep(10.0)
            assert all(engine.load.num_running == CHIP.max_num_seqs for engine in fleet.engines)
            for number in range(40):
                gateway.submit(f"r{number}", prompt_of(500, seed), 20)
            await fleet.until_done()
            answers = gateway.answers | for_batch.answers
            assert not gateway.failures | for_batch.failures
            chats = [answer.ttft_s for name, answer in answers.items() if name[0] == "r"]
            assert max(chats) < 1.0
            batch = [answer for name, answer in answers.items() if name[0] == "b"]
            assert [answer.num_tokens for answer in batch] == [1200] * 160
            # One leaves for each, and hardly one more.
            assert 30 < sum(answer.pause_s is not None for answer in batch) <= 44

    run_on_network(main())


def test_line_in_front_of_a_first_engine_refuses_nobody_it_has_time_for() -> None:
    """Nothing is known of lengths when a model's first engine comes; the line is 15 s of its work.

    At first answers were counted as if they had no tokens, and those who came after the first of
    them had ended as twenty times the work: 77 of 554 were sent away from a line of 20 s.
    """

    async def main() -> None:
        pace = PacedConfig(time_per_token_s=0.02, tpot_per_seq_s=0.005, max_num_seqs=16)
        async with simulated_fleet(1, [], deadline_s=120.0) as fleet:
            (gateway,) = fleet.gateways
            for number in range(400):
                if number == 100:
                    await fleet.add_engine(PacedEngine(pace))
                gateway.submit(f"r{number}", [1, 2, number // 256, number % 256], 20)
                await asyncio.sleep(0.1)
            await fleet.until_done()
            assert gateway.failures == {}
            assert 10.0 < max(answer.ttft_s for answer in fleet.answers) < 50.0

    run_on_network(main())


def test_nobody_is_refused_while_answers_that_began_together_have_not_ended() -> None:
    """Ninety come at once and fill two engines for 20 s, and then comes what these can just do.

    In the 20 s nothing ends, and within two seconds after them all does. The first answers that had
    ended were a rate once, by which those who came then were told to come back in up to 43 s.
    """

    async def main() -> None:
        pace = PacedConfig(time_per_token_s=0.05, tpot_per_seq_s=0.0, max_num_seqs=32)
        seed = random.Random(3)
        async with simulated_fleet(1, engines_of(pace, 2), deadline_s=30.0) as fleet:
            (gateway,) = fleet.gateways
            gateway.submit("before", prompt_of(10, seed), 400)
            await fleet.until_done()
            await asyncio.sleep(1.0)  # its length is looked at
            for number in range(90):
                gateway.submit(f"a{number}", prompt_of(10, seed), 380 + number % 40)
            for number in range(120):
                await asyncio.sleep(seed.expovariate(2.5))
                gateway.submit(f"n{number}", prompt_of(10, seed), seed.randint(380, 420))
            await fleet.until_done()
            assert gateway.failures == {}
            assert 10.0 < max(answer.ttft_s for answer in fleet.answers) < 30.0

    run_on_network(main())
