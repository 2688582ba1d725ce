"""What happens to a stream that is written past vLLM: losses, failures, clients that leave or wait.

Over HTTP, with vLLM's frontend and a scripted engine.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.domain.tokens.paced import paced_token
from serving.gateway.edge.http import HttpEdge
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams.unread import UnreadLimits
from serving.link.messages import Finish, Step, TokenOutput
from tests.gateway.engines import TOKEN_RANGE, ScriptedLink
from tests.gateway.test_failed_after_admission import OneVersion, Streamed
from tests.gateway.test_forged_resume import CONFIG, DEADLINE_S, MODEL
from tests.gateway.test_http_edge import edge_over

from .over_http import HttpStream, events_in, http_server, joined
from .test_plain_streams import CHAT, COMPLETIONS, PARSERS, chat

pytestmark = pytest.mark.imports_vllm

# Longer than a test: what is held stays until something else sends it.
HELD = {"min_hold_s": 1.0, "max_hold_s": 1.0}
NOT_HELD = {"max_hold_s": 0.0}


@dataclass
class Served:
    """One version of a model at an HTTP server."""

    version: ModelVersion
    edge: HttpEdge
    port: int

    def ask(self, max_tokens: int, **options: object) -> HttpStream:
        body = {"model": MODEL, "stream": True, "prompt": "A slice is", "max_tokens": max_tokens}
        return HttpStream(self.port, COMPLETIONS, body | options)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds that a turn of the loop may change."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)

    async def until_direct(self, link: ScriptedLink, num_streams: int = 1) -> None:
        """Steps the engine until so many streams are written past vLLM."""
        await self.until(lambda: len(link.running) >= num_streams)
        num_before = -1
        while self.version.client.num_direct < num_streams:
            assert num_before < 0 or num_before < 100, "it never was"
            num_before += 1
            link.step()
            for _ in range(50):
                await asyncio.sleep(0)


@asynccontextmanager
async def served(
    config: ModelConfig = CONFIG, unread: UnreadLimits | None = None, **gateway: float
) -> AsyncIterator[Served]:
    version = await ModelVersion.build(config, GatewayConfig(**gateway))  # type: ignore[arg-type]
    edge = edge_over(OneVersion(version), unread=unread or UnreadLimits())
    async with http_server(edge) as port:
        yield Served(version, edge, port)
    assert (version.client.num_direct, version.llm.num_in_flight) == (0, 0)
    assert version.dispatcher.num_in_flight == 0
    version.llm.shutdown()


def answer_of(version: ModelVersion, num_tokens: int) -> str:
    """What every engine here makes of the prompt of `Served.ask`."""
    tokenizer = version.llm.renderer.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("A slice is")
    ids = [paced_token(prompt, position, TOKEN_RANGE) for position in range(num_tokens)]
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("gateway", [HELD, NOT_HELD], ids=["held", "not-held"])
async def test_stream_goes_on_at_another_engine_token_for_token(gateway: dict[str, float]) -> None:
    async with served(**gateway) as here:
        first = ScriptedLink(here.version.dispatcher, "e1")
        second = ScriptedLink(here.version.dispatcher, "e2")
        stream = here.ask(40, stream_options={"include_usage": True})
        await here.until_direct(first)
        first.step(5)
        first.end()
        second.step(3)
        second.end()
        third = ScriptedLink(here.version.dispatcher, "e3")
        # A resumed request begins with an output that has more than tokens.
        num_emitted = len(third.submitted[0].emitted_token_ids)
        third.step(40 - num_emitted)
        async with asyncio.timeout(DEADLINE_S):
            await stream.task
        assert stream.text == answer_of(here.version, 40)
        assert stream.events[-1]["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("gateway", [HELD, NOT_HELD], ids=["held", "not-held"])
async def test_tokens_that_came_before_a_failure_are_written_before_the_error(
    gateway: dict[str, float],
) -> None:
    async with served(max_engine_losses=1, **gateway) as here:
        link = ScriptedLink(here.version.dispatcher)
        stream = here.ask(100)
        await here.until_direct(link)
        link.step(5)
        num_emitted = len(
            next(iter(here.version.dispatcher.connections[0].requests.values())).emitted
        )
        link.end()
        async with asyncio.timeout(DEADLINE_S):
            await stream.task
        assert stream.text == answer_of(here.version, num_emitted)
        assert stream.events[-1]["error"]["code"] == "poison_request"


async def test_client_that_leaves_frees_its_request_and_its_stream() -> None:
    async with served(**HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        leaves, stays = here.ask(100), here.ask(100)
        await here.until_direct(link, 2)
        leaves.task.cancel()
        await here.until(lambda: here.version.client.num_direct == 1)
        await here.until(lambda: len(link.running) == 1)
        link.step(100)
        async with asyncio.timeout(DEADLINE_S):
            await stays.task
        assert stays.text == answer_of(here.version, 100)


@pytest.mark.slow
async def test_client_that_does_not_read_gets_all_and_keeps_nobody_waiting() -> None:
    num_tokens = 700
    async with served(**NOT_HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        slow, other = here.ask(num_tokens), here.ask(num_tokens)
        await here.until_direct(link, 2)
        slow.may_read.clear()
        while link.running:
            num_parts = len(other.parts)
            link.step()
            await here.until(lambda n=num_parts: len(other.parts) > n or other.task.done())
        async with asyncio.timeout(DEADLINE_S):
            await other.task
            slow.may_read.set()
            await slow.task
        assert slow.text == other.text == answer_of(here.version, num_tokens)
        # Its buffers were full: the rest waited as tokens, and came as few events.
        assert len(slow.parts) < num_tokens - 150 < len(other.parts)


async def test_metrics_count_what_was_written_past_vllm() -> None:
    async with served(**NOT_HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        stream = here.ask(60)
        await here.until_direct(link)
        while link.running:
            link.step()
            for _ in range(20):
                await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await stream.task
        numbers = here.version.dispatcher.telemetry.metrics.classes["local"]
        assert (numbers.output_tokens, numbers.output_chunks) == (60, 60)
        # The first, the ninth and so on.
        assert sum(numbers.gateway_output.counts) == 8
        assert sum(numbers.gateway_hold.counts) == 0


async def test_stream_whose_thoughts_are_over_is_plain_from_there_on() -> None:
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    body |= chat(chat_template_kwargs={"enable_thinking": True})[1]
    answers = []
    async with served(PARSERS, **NOT_HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        tokenizer = here.version.llm.renderer.tokenizer
        assert tokenizer is not None
        said = tokenizer.encode(
            "Four chips.</think>A slice has four chips.", add_special_tokens=False
        )
        for is_over_http in (True, False):
            stream = (
                HttpStream(here.port, CHAT, body)
                if is_over_http
                else Streamed(here.edge, CHAT, body)
            )
            await here.until(lambda: bool(link.running))
            (wire_id,) = link.running
            was_direct = False
            for place, token_id in enumerate(said):
                finish = int(Finish.STOP) if place == len(said) - 1 else None
                output = TokenOutput(wire_id, [token_id], finish)
                here.version.dispatcher.take_step(link.engine_id, Step([output]))
                for _ in range(50):
                    await asyncio.sleep(0)
                was_direct |= here.version.client.num_direct > 0
            link.abort([wire_id])
            async with asyncio.timeout(DEADLINE_S):
                await stream.task
            assert was_direct == is_over_http
            parts = stream.parts if isinstance(stream, HttpStream) else stream.chunks
            answers.append(events_in(parts))
    assert joined(answers[0]) == joined(answers[1])
    assert "reasoning" in str(answers[0])
