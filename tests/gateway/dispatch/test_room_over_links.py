"""Gateways and engines over real links: an engine has what it has room for, and never idles."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serving.domain.slice_records import Snapshot
from serving.engine.paced.config import PacedConfig
from tests.gateway.dispatch.test_dispatcher_over_links import Gateway, gateway
from tests.gateway.engines import answer_to
from tests.link.test_link_stats import until

# Steps of 5 ms, so that a gateway hears of room many times while requests run.
SMALL = PacedConfig(time_per_token_s=0.005, max_num_seqs=4)
LONG_PROMPTS = PacedConfig(
    prefill_tokens_per_s=20_000.0, max_num_batched_tokens=100, max_num_seqs=50
)
NUM_TOKENS = 3


@asynccontextmanager
async def beside(first: Gateway, name: str) -> AsyncIterator[Gateway]:
    """Another gateway, linked to the same engines."""
    subject = Gateway(name)
    try:
        subject.membership.apply(Snapshot("1", tuple(first.records)))
        await until(lambda: len(subject.dispatcher.connections) == len(first.records))
        yield subject
    finally:
        await subject.membership.close()


class Longest:
    """Looks every millisecond at how many requests and tokens an engine has."""

    def __init__(self, first: Gateway) -> None:
        self.num_sequences = self.num_waiting = self.backlog_tokens = 0
        self._engines = first.engines
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            for engine in self._engines.values():
                load = engine.load
                self.num_sequences = max(self.num_sequences, load.num_running + load.num_waiting)
                self.num_waiting = max(self.num_waiting, load.num_waiting)
                self.backlog_tokens = max(self.backlog_tokens, load.backlog_tokens)
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


async def all_answered(subject: Gateway, request_ids: list[str]) -> None:
    await subject.until(lambda: subject.finished >= set(request_ids))
    assert {each: subject.tokens[each] for each in request_ids} == {
        each: answer_to(each, NUM_TOKENS) for each in request_ids
    }
    assert not subject.failures


async def test_one_gateway_never_gives_an_engine_more_than_it_has_places() -> None:
    async with gateway(2, config=SMALL) as subject:
        longest = Longest(subject)
        wanted = names("r", 60)
        for request_id in wanted:
            subject.submit(request_id, NUM_TOKENS)
        assert subject.dispatcher.num_waiting == 60 - 2 * SMALL.max_num_seqs
        await all_answered(subject, wanted)
        await longest.stop()
        assert longest.num_sequences == SMALL.max_num_seqs
        assert longest.num_waiting == 0
        assert subject.dispatcher.num_waiting == 0


@pytest.mark.parametrize("num_gateways", [2, 5])
async def test_gateways_together_give_an_engine_no_more_than_was_promised_to_them(
    num_gateways: int,
) -> None:
    """While all was free, each was promised its part, and one of them got the rest at once."""
    async with gateway(2, config=SMALL) as first, _others(first, num_gateways - 1) as others:
        longest = Longest(first)
        gateways = [first, *others]
        wanted = {id(each): names(f"g{number}-", 40) for number, each in enumerate(gateways)}
        for each in gateways:
            for request_id in wanted[id(each)]:
                each.submit(request_id, NUM_TOKENS)
        await asyncio.gather(*(all_answered(each, wanted[id(each)]) for each in gateways))
        await longest.stop()
        promised = -(-SMALL.max_num_seqs // num_gateways)
        assert longest.num_sequences <= SMALL.max_num_seqs + (num_gateways - 1) * promised


async def test_a_gateway_with_few_requests_does_not_wait_behind_one_with_many() -> None:
    async with gateway(1, config=SMALL) as many, beside(many, "few") as few:
        for request_id in names("m", 200):
            many.submit(request_id, NUM_TOKENS)
        for request_id in names("f", 4):
            few.submit(request_id, NUM_TOKENS)
        await all_answered(few, names("f", 4))
        assert many.dispatcher.num_waiting > 100


async def test_prompts_in_line_are_those_of_a_step_and_one_more() -> None:
    async with gateway(1, config=LONG_PROMPTS) as subject:
        longest = Longest(subject)
        wanted = [f"{number:080}" for number in range(20)]  # prompts of 80 tokens
        for request_id in wanted:
            subject.submit(request_id, NUM_TOKENS)
        await all_answered(subject, wanted)
        await longest.stop()
        # One more comes as long as the others are less than a step's 100.
        assert longest.backlog_tokens < 100 + 80


async def test_what_waits_goes_to_an_engine_that_comes() -> None:
    async with gateway(1, config=SMALL) as subject:
        wanted = names("r", 100)
        for request_id in wanted:
            subject.submit(request_id, NUM_TOKENS)
        await subject.start_engine()
        await all_answered(subject, wanted)
        given = [each.num_dispatched for each in subject.dispatcher.connections]
        assert min(given) > 20


async def test_an_abort_makes_room_at_once_for_what_waits_at_another_gateway() -> None:
    slow = PacedConfig(time_per_token_s=3600.0, ttft_s=0.0, max_num_seqs=2)
    async with gateway(1, config=slow) as first, beside(first, "other") as other:
        for request_id in names("r", 2):
            first.submit(request_id, 100)
        (engine,) = first.engines.values()
        await until(lambda: engine.load.num_running == 2)
        for request_id in ("promised before it was full", "waits"):
            other.submit(request_id, 100)
        assert other.dispatcher.num_waiting == 1
        first.dispatcher.abort(["r0", "r1"])
        await until(lambda: not other.dispatcher.num_waiting)


@asynccontextmanager
async def _others(first: Gateway, count: int) -> AsyncIterator[list[Gateway]]:
    if not count:
        yield []
        return
    async with beside(first, f"gw{count}") as one, _others(first, count - 1) as others:
        yield [one, *others]
