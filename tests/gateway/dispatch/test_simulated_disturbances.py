"""Whatever befalls a fleet: each request is answered whole and once, and none is starved.

In simulated time, with real links: two or three gateways, tenants and classes of service; engines
that come, drain and are lost, and clients that leave, as the tool draws them.
"""

import asyncio
import random
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.domain.errors import PoisonRequestError
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.tokens.paced import paced_token
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from tests.gateway.dispatch.simulated_fleet import (
    Answer,
    SimulatedFleet,
    SimulatedGateway,
    prompt_of,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import run_on_network

# Four at once, so that requests wait: about 17 of the flood's in a second.
ENGINE = PacedConfig(
    time_per_token_s=0.01,
    tpot_per_seq_s=0.001,
    prefill_tokens_per_s=20_000.0,
    max_num_seqs=4,
    max_num_batched_tokens=2048,
    max_model_len=1500,
    kv_cache_tokens=8000,
)
# All at once, before anything else: whoever had to wait for it would wait for seven seconds.
FLOOD, FLOOD_PROMPT, FLOOD_TOKENS = 250, 100, 15
TENANTS = ("one", "two", "three")
# A silent engine counts a third of a loss, and three losses end a request.
LOSSES_THAT_END = 9
# Beside the work of others: messages, a step that has begun, the rest of those that were there.
MORE_S = 0.5

requests = st.tuples(
    st.just("ask"),
    st.sampled_from(TENANTS),
    st.sampled_from(list(ServiceClass)),
    st.integers(1, 600),  # tokens of the prompt
    st.integers(1, 60),  # and of the answer
    st.booleans(),  # whether it begins as others do
)
disturbances = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("drain"), st.integers(0, 9), st.sampled_from([None, 0.0, 1.0])),
    st.tuples(st.just("add")),
)
# Tenths of a second, and what happens then.
scripts = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(requests, requests, disturbances)),
    min_size=4,
    max_size=16,
)


@dataclass(slots=True)
class Asked:
    """A request, and what an engine that is full takes for it, as a share of its time."""

    gateway: SimulatedGateway
    request_id: str
    prompt: list[int]
    max_tokens: int
    tenant: str
    service_class: ServiceClass
    is_aborted: bool = False

    @property
    def answer(self) -> Answer:
        return self.gateway.answers[self.request_id]

    @property
    def work_s(self) -> float:
        seqs = ENGINE.max_num_seqs
        step_s = ENGINE.time_per_token_s + seqs * ENGINE.tpot_per_seq_s
        assert ENGINE.prefill_tokens_per_s is not None
        prefill_s = len(self.prompt) / ENGINE.prefill_tokens_per_s
        return prefill_s + (self.max_tokens + 1) * step_s / seqs


@dataclass(slots=True)
class Played:
    """What was asked of a fleet, and what befell it."""

    fleet: SimulatedFleet
    asked: list[Asked] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)  # engines that were lost
    draining: set[int] = field(default_factory=set)
    num_disturbed: int = 0
    without_s: float = 0.0  # for so long no engine took requests
    _numbers: "count[int]" = field(default_factory=count)

    def ask(
        self, tenant: str, service_class: ServiceClass, length: int, tokens: int, *, is_like: bool
    ) -> None:
        number = next(self._numbers)
        own = random.Random(number)
        common = prompt_of(400, random.Random("common")) if is_like else []
        # Its own number comes last: each has another answer.
        prompt = [*common, *prompt_of(length, own), number % 256, number // 256]
        gateway = own.choice(self.fleet.gateways)
        each = Asked(gateway, f"r{number}", prompt, tokens, tenant, service_class)
        self.asked.append(each)
        given = {"tenant": tenant, "service_class": service_class}
        gateway.submit(each.request_id, prompt, tokens, **given)

    async def befall(self, name: str, *facts: object) -> None:
        if name == "ask":
            tenant, service_class, length, tokens, is_like = facts
            self.ask(tenant, service_class, length, tokens, is_like=is_like)  # type: ignore[arg-type]
            return
        if name == "add":
            await self.fleet.add_engine(PacedEngine(ENGINE))
            return
        self.num_disturbed += 1
        if name == "abort":
            own = [each for each in self.asked if each.tenant in TENANTS]
            if own:
                each = own[facts[0] % len(own)]  # type: ignore[operator]
                # Some have ended already, which is nobody's loss.
                each.is_aborted = True
                each.gateway.abort(each.request_id)
            return
        left = [at for at in range(len(self.fleet.engines)) if at not in self.gone]
        if not left:
            return
        at = left[facts[0] % len(left)]  # type: ignore[operator]
        if name == "lose":
            self.gone.add(at)
            await self.fleet.lose_engine(at)
        else:
            self.draining.add(at)
            self.fleet.drain_engine(at, facts[1])  # type: ignore[arg-type]

    @property
    def is_without(self) -> bool:
        return len(self.gone | self.draining) == len(self.fleet.engines)

    def bound_s(self, one: Asked) -> float:
        """How long a request waits at most for its first token, by the work before it.

        One engine is full of work all the time, and takes tenants in turns: for each of its own
        before it, and for itself, every other tenant of its class has as much. Work of classes
        before it goes first, whenever it comes. Each disturbance gives the places that a tenant
        was about to have to those that have lost theirs.
        """
        of_class = [each for each in self.asked if each.service_class == one.service_class]
        largest_s = max(each.work_s for each in of_class)
        before = [
            each
            for each in of_class
            if each.tenant == one.tenant and each.answer.came_at_s <= one.answer.came_at_s
        ]
        num_tenants = len({each.tenant for each in of_class})
        turns_s = num_tenants * (sum(each.work_s for each in before) + largest_s)
        first_s = sum(each.work_s for each in self.asked if each.service_class < one.service_class)
        lost_s = (1 + self.num_disturbed) * ENGINE.max_num_seqs * largest_s
        return turns_s + first_s + lost_s + self.without_s + MORE_S


def check(played: Played) -> None:
    for each in played.asked:
        error = each.gateway.failures.get(each.request_id)
        expected = [
            paced_token(each.prompt, position, ENGINE.token_range)
            for position in range(each.max_tokens)
        ]
        tokens = each.answer.tokens
        if error is not None:
            assert isinstance(error, PoisonRequestError)
            assert len(played.gone) >= LOSSES_THAT_END
        if error is not None or each.is_aborted:
            assert tokens == expected[: len(tokens)]
            continue
        assert tokens == expected
        if each.service_class is not ServiceClass.BATCH:
            assert each.answer.ttft_s <= played.bound_s(each)
    for gateway in played.fleet.gateways:
        dispatcher = gateway.dispatcher
        assert (dispatcher.num_in_flight, dispatcher.num_waiting) == (0, 0)
        assert not any(engine.requests for engine in dispatcher.connections)


def play(num_gateways: int, script: list[tuple[int, tuple[object, ...]]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engines = [PacedEngine(ENGINE) for _ in range(2)]
        async with simulated_fleet(num_gateways, engines) as fleet:
            played = Played(fleet)
            for _ in range(FLOOD):
                size = FLOOD_PROMPT, FLOOD_TOKENS
                played.ask("flood", ServiceClass.STANDARD, *size, is_like=False)
            began_s = last_s = loop.time()
            for at, (name, *facts) in sorted(script, key=lambda each: each[0]):
                await asyncio.sleep(began_s + at / 10 - loop.time())
                if played.is_without:
                    played.without_s += loop.time() - last_s
                last_s = loop.time()
                await played.befall(str(name), *facts)
            if played.is_without:
                played.without_s += loop.time() - last_s
            await played.befall("add")
            async with asyncio.timeout(120):
                await fleet.until_done()
            check(played)

    run_on_network(main())


# An engine's link breaks in the moment in which it is the only one, and 170 wait.
BOTH_LOST = [
    (0, ("add",)),
    (0, ("lose", 0)),
    (17, ("drain", 5, None)),
    (26, ("lose", 0)),
    (26, ("lose", 0)),
    (29, ("ask", "one", ServiceClass.INTERACTIVE, 241, 52, True)),
]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(2, 3), scripts)
@example(2, BOTH_LOST)
def test_whatever_befalls_a_fleet_requests_are_answered_once_and_in_their_turn(
    num_gateways: int, script: list[tuple[int, tuple[object, ...]]]
) -> None:
    play(num_gateways, script)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.integers(2, 3), scripts)
def test_of_many_more_draws_all_are_answered_once_and_in_their_turn(
    num_gateways: int, script: list[tuple[int, tuple[object, ...]]]
) -> None:
    play(num_gateways, script)
