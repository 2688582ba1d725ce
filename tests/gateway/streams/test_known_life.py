"""What happens to a chat of a known form: losses, failures, clients that leave or do not read.

Over HTTP, with vLLM's frontend and a scripted engine. The first requests of a form, which vLLM
answers, say what the third has to say.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serving.config.models import ModelConfig
from serving.gateway.streams.unread import UnreadLimits
from tests.gateway.engines import ScriptedLink
from tests.gateway.test_forged_resume import CONFIG, DEADLINE_S, MODEL

from .over_http import HttpStream
from .test_direct_life import HELD, NOT_HELD, Served, served
from .test_plain_streams import CHAT, MESSAGES, PARSERS

pytestmark = pytest.mark.imports_vllm


class Taught:
    """A model at an HTTP server that has answered a chat of so many tokens."""

    def __init__(self, here: Served, max_tokens: int) -> None:
        self.here = here
        self.dispatcher = here.version.dispatcher
        self.max_tokens = max_tokens
        self.text = ""

    def ask(self) -> HttpStream:
        body = {"model": MODEL, "stream": True, "messages": MESSAGES, "max_tokens": self.max_tokens}
        return HttpStream(self.here.port, CHAT, body | {"stream_options": {"include_usage": True}})

    async def learn(self) -> None:
        link = ScriptedLink(self.dispatcher, "teacher")
        for _ in range(2):
            stream = self.ask()
            await self.here.until(lambda: bool(link.running))
            assert self.here.version.client.num_known == 0
            link.step(self.max_tokens)
            async with asyncio.timeout(DEADLINE_S):
                await stream.task
        link.end()
        self.text = stream.text
        assert self.text

    async def until_running(self, link: ScriptedLink, num_requests: int = 1) -> None:
        """Waits until so many chats of the known form are at an engine."""
        await self.here.until(lambda: len(link.running) >= num_requests)
        assert self.here.version.client.num_known == num_requests

    async def step(self, link: ScriptedLink, num_tokens: int = 1) -> None:
        """Steps one by one, each as far as the client."""
        for _ in range(num_tokens):
            link.step()
            for _ in range(20):
                await asyncio.sleep(0)


@asynccontextmanager
async def taught(
    max_tokens: int = 40,
    config: ModelConfig = CONFIG,
    unread: UnreadLimits | None = None,
    **gateway: float,
) -> AsyncIterator[Taught]:
    async with served(config, unread, **gateway) as here:
        model = Taught(here, max_tokens)
        await model.learn()
        yield model


async def whole(stream: HttpStream) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await stream.task


@pytest.mark.parametrize("config", [CONFIG, PARSERS], ids=["no-parsers", "shipped-parsers"])
@pytest.mark.parametrize("gateway", [HELD, NOT_HELD], ids=["held", "not-held"])
@pytest.mark.parametrize("num_before", [0, 1, 5])
async def test_answer_goes_on_at_another_engine_token_for_token(
    gateway: dict[str, float], num_before: int, config: ModelConfig
) -> None:
    async with taught(config=config, **gateway) as model:
        first = ScriptedLink(model.dispatcher, "e1")
        second = ScriptedLink(model.dispatcher, "e2")
        stream = model.ask()
        await model.here.until(lambda: bool(first.running or second.running))
        one, other = (first, second) if first.running else (second, first)
        await model.step(one, num_before)
        one.end()
        await model.until_running(other)
        assert len(other.submitted[0].emitted_token_ids) == num_before
        await model.step(other, 3)
        other.end()
        third = ScriptedLink(model.dispatcher, "e3")
        # A resumed request begins with an output that has more than tokens.
        third.step(model.max_tokens - len(third.submitted[0].emitted_token_ids))
        await whole(stream)
        assert stream.text == model.text
        assert stream.events[-1]["usage"]["completion_tokens"] == model.max_tokens


@pytest.mark.parametrize("gateway", [HELD, NOT_HELD], ids=["held", "not-held"])
async def test_tokens_that_came_before_a_failure_are_written_before_the_error(
    gateway: dict[str, float],
) -> None:
    async with taught(max_engine_losses=1, **gateway) as model:
        link = ScriptedLink(model.dispatcher)
        stream = model.ask()
        await model.until_running(link)
        await model.step(link, 6)
        link.end()
        await whole(stream)
        assert stream.events[-1]["error"]["code"] == "poison_request"
        assert stream.text
        assert model.text.startswith(stream.text)
        assert b"".join(stream.parts).endswith(b"data: [DONE]\n\n")


async def test_failure_before_the_first_token_is_an_answer_with_its_status() -> None:
    async with taught(max_engine_losses=1, **NOT_HELD) as model:
        link = ScriptedLink(model.dispatcher)
        stream = model.ask()
        await model.until_running(link)
        link.end()
        async with asyncio.timeout(DEADLINE_S):
            # It is no stream.
            with pytest.raises(AssertionError, match="content-length"):
                await stream.task
        assert stream.status == 500


async def test_client_that_leaves_frees_its_request() -> None:
    async with taught(100, **HELD) as model:
        link = ScriptedLink(model.dispatcher)
        waits, leaves, stays = model.ask(), model.ask(), model.ask()
        await model.until_running(link, 3)
        waits.task.cancel()
        await model.here.until(lambda: model.here.version.client.num_known == 2)
        await model.step(link, 5)
        leaves.task.cancel()
        await model.here.until(lambda: model.here.version.client.num_known == 1)
        await model.here.until(lambda: len(link.running) == 1)
        link.step(100)
        await whole(stays)
        assert stays.text == model.text


@pytest.mark.slow
async def test_client_that_does_not_read_gets_all_and_keeps_nobody_waiting() -> None:
    async with taught(700, **NOT_HELD) as model:
        link = ScriptedLink(model.dispatcher)
        slow, other = model.ask(), model.ask()
        await model.until_running(link, 2)
        slow.may_read.clear()
        while link.running:
            num_parts = len(other.parts)
            link.step()
            await model.here.until(lambda n=num_parts: len(other.parts) > n or other.task.done())
        await whole(other)
        slow.may_read.set()
        await whole(slow)
        assert slow.text == other.text == model.text
        # Its buffers were full: the rest waited as tokens, and came as few events.
        assert len(slow.parts) < model.max_tokens - 150 < len(other.parts)


async def test_metrics_count_what_was_written() -> None:
    async with taught(60, **NOT_HELD) as model:
        link = ScriptedLink(model.dispatcher)
        numbers = model.dispatcher.telemetry.metrics.classes["local"]
        before = (numbers.output_tokens, numbers.output_chunks, sum(numbers.gateway_output.counts))
        stream = model.ask()
        await model.until_running(link)
        await model.step(link, 60)
        await whole(stream)
        tokens, chunks, timed = before
        assert (numbers.output_tokens, numbers.output_chunks) == (tokens + 60, chunks + 60)
        # The first, the ninth and so on.
        assert sum(numbers.gateway_output.counts) == timed + 8
