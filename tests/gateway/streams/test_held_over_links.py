"""Tokens that are held, over real links to paced engines that die: none is lost or doubled."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.streams.hold import TokenHold
from serving.gateway.streams.pace import HoldBounds
from tests.gateway.core_requests import core_request
from tests.gateway.dispatch.test_dispatcher_over_links import Gateway, gateway, kill_two
from tests.gateway.engines import answer_to

pytestmark = pytest.mark.imports_vllm

HOLD_S = 0.02


@asynccontextmanager
async def read(subject: Gateway) -> AsyncIterator[tuple[FleetEngineClient, list[int]]]:
    """An engine client over the gateway's engines, and how many tokens each of its outputs has."""
    hold = TokenHold(HoldBounds(HOLD_S, HOLD_S))
    client = FleetEngineClient(subject.dispatcher, ("generate",), hold=hold)
    client.set_failure_sink(subject.fail)
    sizes: list[int] = []

    async def fetch() -> None:
        while True:
            for output in (await client.get_output_async()).outputs:
                sizes.append(len(output.new_token_ids))
                subject.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in subject.finished
                    subject.finished.add(output.request_id)
                subject._changed.set()

    reading = asyncio.create_task(fetch())
    yield client, sizes
    reading.cancel()


@pytest.mark.parametrize("seed", range(3))
async def test_held_requests_finish_token_exactly_whenever_their_engines_die(seed: int) -> None:
    chance = random.Random(seed)
    wanted = {f"r{number}": chance.randint(50, 400) for number in range(32)}
    async with gateway(num_engines=3) as subject, read(subject) as (client, sizes):
        for request_id, max_tokens in wanted.items():
            await client.add_request_async(core_request(request_id, max_tokens))
        await kill_two(subject, chance)
        await subject.until(lambda: subject.finished == wanted.keys())
        assert subject.tokens == {key: answer_to(key, count) for key, count in wanted.items()}
        assert (subject.failures, subject.dispatcher.num_in_flight) == ({}, 0)
    assert len(sizes) < sum(wanted.values()) / 2
