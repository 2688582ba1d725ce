"""Conversations find what engines have of them while engines come, go and are lost.

In simulated time, with real links: two gateways, of which each turn goes to either.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from serving.domain.tokens.paced import paced_token
from tests.gateway.dispatch.simulated_fleet import (
    CHIP,
    CHIP_WITH_CACHE,
    Answer,
    SimulatedFleet,
    engines_of,
    prompt_of,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import run_on_network

pytestmark = pytest.mark.slow

# Turns come so that engines are half busy: a line does not speak against what is cached.
BETWEEN_S = 0.1


@dataclass(slots=True)
class Conversation:
    """What was said so far, answers too, and the last turn's answer."""

    name: str
    said: list[int]
    num_turns: int = 0
    answer: Answer | None = None

    @property
    def engine_id(self) -> str:
        assert self.answer is not None
        assert self.answer.engine_id is not None
        return self.answer.engine_id


@dataclass(slots=True)
class Talk:
    """Conversations at one fleet, and what the last turn of each has found."""

    fleet: SimulatedFleet
    chance: random.Random = field(default_factory=lambda: random.Random(8))
    conversations: list[Conversation] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)  # whole blocks of what was said before

    def begin(self, count: int) -> None:
        for _ in range(count):
            said = prompt_of(self.chance.randrange(300, 900), self.chance)
            name = f"c{len(self.conversations)}"
            self.conversations.append(Conversation(name, said))

    def on(self, engine_id: str) -> set[str]:
        return {each.name for each in self.conversations if each.engine_id == engine_id}

    @property
    def lost(self) -> set[str]:
        """Those whose last turn has not found all of what was said before."""
        return {name for name, least in self.least.items() if self.found[name] < least}

    async def ask_all(self, num_tokens: int = 30) -> None:
        self.chance.shuffle(self.conversations)
        for each in self.conversations:
            await asyncio.sleep(BETWEEN_S)
            asked = each.said + prompt_of(self.chance.randrange(20, 200), self.chance)
            gateway = self.chance.choice(self.fleet.gateways)
            request_id = f"{each.name}-{each.num_turns}"
            gateway.submit(request_id, asked, num_tokens)
            if each.num_turns:
                # An engine has computed all but the last token of its answer.
                num_blocks = (len(each.said) - 1) // CHIP_WITH_CACHE.block_size
                self.least[each.name] = num_blocks * CHIP_WITH_CACHE.block_size
            each.num_turns, each.said = each.num_turns + 1, asked
            each.answer = gateway.answers[request_id]

    async def heard(self) -> None:
        """Waits for the answers to what was asked."""
        await self.fleet.until_done()
        assert not any(gateway.failures for gateway in self.fleet.gateways)
        for each in self.conversations:
            assert each.answer is not None
            expected = [
                paced_token(each.said, position, CHIP.token_range)
                for position in range(each.answer.num_tokens)
            ]
            assert each.answer.tokens == expected
            self.found[each.name] = each.answer.num_cached
            each.said = each.said + each.answer.tokens

    async def turn(self, num_tokens: int = 30) -> set[str]:
        """Has each say something; returns those that did not find what was said before."""
        await self.ask_all(num_tokens)
        await self.heard()
        return self.lost


def test_conversations_find_their_engines_after_one_comes_and_goes_and_is_lost() -> None:
    async def main() -> None:
        async with simulated_fleet(2, engines_of(CHIP_WITH_CACHE, 3)) as fleet:
            talk = Talk(fleet)
            talk.begin(18)
            await talk.turn()
            assert all(talk.on(name) for name in ("e0", "e1", "e2"))
            assert await talk.turn() == set()
            # A fourth engine comes: nobody leaves what it has, and who is new goes there too.
            before = {name: talk.on(name) for name in ("e0", "e1", "e2")}
            await fleet.add_engine(*engines_of(CHIP_WITH_CACHE, 1))
            talk.begin(8)
            assert await talk.turn() == set()
            assert talk.on("e3")
            assert all(before[name] <= talk.on(name) for name in before)
            assert await talk.turn() == set()
            # One is lost: its conversations are computed anew, once.
            orphans = talk.on("e0")
            await fleet.lose_engine(0)
            assert await talk.turn() == orphans
            assert await talk.turn() == set()
            # One drains, and nobody knows for how long: it gets nothing, whatever it has.
            leaving = talk.on("e1")
            assert leaving
            fleet.drain_engine(1, None)
            assert await talk.turn() == leaving
            assert not talk.on("e1")
            assert await talk.turn() == set()
            as_expected, missing, _ = fleet.forecast()
            assert missing == 0
            assert as_expected > 50_000

    run_on_network(main())


@pytest.mark.parametrize("way", ["lost", "drained"])
def test_the_turn_after_one_that_has_moved_finds_prompt_and_answer(way: str) -> None:
    """Streams are in the midst of their answers when their engine goes."""

    async def main() -> None:
        async with simulated_fleet(2, engines_of(CHIP_WITH_CACHE, 3)) as fleet:
            talk = Talk(fleet)
            talk.begin(12)
            await talk.turn()
            await talk.ask_all(num_tokens=300)
            if way == "lost":
                await fleet.lose_engine(0)
            else:
                fleet.drain_engine(0, 0.0)
            await talk.heard()
            moves = sum(
                numbers.resumes[cause]
                for gateway in fleet.gateways
                for numbers in gateway.dispatcher.telemetry.metrics.classes.values()
                for cause in ("lost", "draining")
            )
            assert moves > 2
            assert not talk.on("e0")
            assert await talk.turn() == set()

    run_on_network(main())
