"""Clients that do not read: how much of their answers may wait, and what it costs others.

The bound is held against the memory that vLLM takes for what waits, and over HTTP by clients that
stop reading.
"""

import asyncio
import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackEncoder

from serving.gateway.streams.connections import ClientConnection
from serving.gateway.streams.unread import UnreadAnswers, UnreadLimits, waiting_bytes
from serving.link.vllm_codec import decode_output, encode_outputs, output_decoder
from tests.gateway.core_requests import core_request
from tests.gateway.engines import ScriptedLink
from tests.gateway.test_forged_resume import DEADLINE_S

from .over_http import HttpStream
from .test_direct_life import NOT_HELD, Served, answer_of, served
from .test_known_life import taught, whole

pytestmark = pytest.mark.imports_vllm

# Above what the server buffers in any case, and soon reached.
SOON = UnreadLimits(of_one=72_000, of_all=10**9)


def test_one_that_leaves_too_much_is_ended() -> None:
    unread: UnreadAnswers[str] = UnreadAnswers(UnreadLimits(of_one=100, of_all=1000))
    assert unread.note("a", 100) is None
    assert unread.note("a", 101) == "a"
    assert unread.total_bytes == 0


def test_of_all_that_leave_too_much_together_the_one_with_most_is_ended() -> None:
    unread: UnreadAnswers[str] = UnreadAnswers(UnreadLimits(of_one=100, of_all=150))
    assert [unread.note("a", 80), unread.note("b", 70)] == [None, None]
    assert unread.note("c", 10) == "a"
    assert unread.total_bytes == 80
    unread.forget("b")
    assert (unread.note("c", 100), unread.total_bytes) == (None, 100)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.integers(0, 60)))),
    st.integers(1, 50),
    st.integers(50, 120),
)
def test_no_more_waits_than_allowed(
    notes: list[tuple[str, int | None]], of_one: int, of_all: int
) -> None:
    unread: UnreadAnswers[str] = UnreadAnswers(UnreadLimits(of_one, of_all))
    waiting: dict[str, int] = {}
    for client, size in notes:
        if size is None:
            unread.forget(client)
            waiting.pop(client, None)
            continue
        waiting[client] = size
        ended = unread.note(client, size)
        assert (ended is None) == (size <= of_one and sum(waiting.values()) <= of_all)
        if ended is not None:
            # It is none that is less behind than others.
            assert waiting[ended] == max(waiting.values()) or ended == client
            del waiting[ended]
        assert unread.total_bytes == sum(waiting.values()) <= of_all


def test_client_of_which_only_the_buffer_was_counted_is_forgotten_too() -> None:
    cycle = SimpleNamespace(
        flow=None, transport=SimpleNamespace(write=None, get_write_buffer_size=lambda: 70)
    )
    unread: UnreadAnswers[ClientConnection] = UnreadAnswers(UnreadLimits())
    connection = ClientConnection(cycle, unread, "r")  # type: ignore[arg-type]
    connection.waits(0)
    assert unread.total_bytes == 70
    connection.caught_up()
    assert unread.total_bytes == 0


def _likelihoods(number: int, num_rivals: int) -> EngineCoreOutput:
    token_ids = np.arange(number % 60, number % 60 + 1 + num_rivals, dtype=np.int32)[None]
    lists = LogprobsLists(
        token_ids, -np.arange(1.0, 2 + num_rivals, dtype=np.float32)[None], np.array([1])
    )
    return EngineCoreOutput("r", [int(token_ids[0, 0])], new_logprobs=lists)


@pytest.mark.parametrize("num_rivals", [None, 0, 5, 20])
def test_what_is_counted_is_what_vllm_takes_for_it(num_rivals: int | None) -> None:
    """The text and the likelihoods that vLLM keeps until the client reads."""
    tokenizer = get_tokenizer("models/slicewise-demo")
    num_tokens, encoder, decoder = 2000, MsgpackEncoder(), output_decoder()
    if num_rivals is None:
        outputs = [EngineCoreOutput("r", [50 + number % 100]) for number in range(num_tokens)]
    else:
        outputs = [_likelihoods(number, num_rivals) for number in range(num_tokens)]
    messages = [encode_outputs([output], encoder)[0] for output in outputs]
    counted = sum(
        waiting_bytes(len(message.token_ids), sum(map(len, message.payload or ())))
        for message in messages
    )
    processor = OutputProcessor(tokenizer, log_stats=False)
    collector = _collector_of(processor, num_rivals)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for message in messages:
            message.token_ids = list(message.token_ids)
            processor.process_outputs([decode_output(message, decoder)])
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    kept = collector.output
    assert isinstance(kept, RequestOutput)
    assert len(kept.outputs[0].token_ids) == num_tokens
    # More than a token and its likelihoods take by themselves is on the safe side.
    assert 0.3 * counted < taken < 1.1 * counted


def _collector_of(processor: OutputProcessor, num_rivals: int | None) -> RequestOutputCollector:
    request = core_request("r", max_tokens=10_000, logprobs=num_rivals, detokenize=True)
    assert request.sampling_params is not None
    request.sampling_params.output_kind = RequestOutputKind.DELTA
    request.external_req_id = request.request_id
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor.add_request(request, prompt=None, queue=collector)
    return collector


def numbers_of(here: Served) -> tuple[int, int]:
    """Clients that were ended since they did not read, and all that left early."""
    metrics = here.edge.metrics
    return metrics.unread.total(), metrics.cancellations.total()


def told_of(here: Served, stream: HttpStream) -> list[str]:
    """What the gateway remembers of a stream's request, event by event."""
    story = here.edge._stories.describe(f"{id(stream):0>120}")
    assert story is not None
    return [event["event"] for event in story["events"]]


async def step_until_ended(here: Served, link: ScriptedLink, *readers: HttpStream) -> None:
    """Steps, each time as far as the readers, until the engine has one request less."""
    num_before = len(link.running)
    while len(link.running) == num_before:
        num_parts = [len(reader.parts) for reader in readers]
        link.step()
        await here.until(
            lambda n=num_parts: all(
                len(reader.parts) > num for reader, num in zip(readers, n, strict=True)
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"n": 2}, {"stop": ["never said"]}], ids=["plain", "two-answers", "stop-string"]
)
async def test_client_that_leaves_too_much_unread_is_ended_and_others_go_on(
    options: dict[str, Any],
) -> None:
    num_tokens = 1600
    async with served(unread=SOON, **NOT_HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        other = here.ask(num_tokens)
        await here.until_direct(link)
        slow = here.ask(num_tokens, **options)
        await here.until(lambda: len(link.running) == 1 + options.get("n", 1))
        slow.may_read.clear()
        await step_until_ended(here, link, other)
        await here.until(lambda: len(link.running) == 1)
        link.step(num_tokens)
        await whole(other)
        assert other.text == answer_of(here.version, num_tokens)
        slow.may_read.set()
        # What was in the sockets is read, and no end comes.
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await whole(slow)
        assert numbers_of(here) == (1, 1)
        assert "unread" in told_of(here, slow)


@pytest.mark.slow
async def test_known_chat_that_is_left_unread_is_ended() -> None:
    async with taught(1600, unread=SOON, **NOT_HELD) as model:
        link = ScriptedLink(model.dispatcher)
        slow, other = model.ask(), model.ask()
        await model.until_running(link, 2)
        slow.may_read.clear()
        await step_until_ended(model.here, link, other)
        link.step(model.max_tokens)
        await whole(other)
        assert other.text == model.text
        slow.task.cancel()
        assert numbers_of(model.here) == (1, 1)


@pytest.mark.slow
async def test_of_many_that_do_not_read_some_are_ended_and_the_rest_get_all() -> None:
    num_tokens, num_slow = 700, 6
    # Room for what the server buffers of four of them.
    limits = UnreadLimits(of_one=10**9, of_all=4 * 80_000)
    async with served(unread=limits, **NOT_HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        slow = [here.ask(num_tokens) for _ in range(num_slow)]
        other = here.ask(num_tokens)
        await here.until_direct(link, num_slow + 1)
        for stream in slow:
            stream.may_read.clear()
        while link.running:
            num_parts = len(other.parts)
            link.step()
            await here.until(lambda n=num_parts: len(other.parts) > n or other.task.done())
        await whole(other)
        for stream in slow:
            stream.may_read.set()
        async with asyncio.timeout(DEADLINE_S):
            ends = await asyncio.gather(*(stream.task for stream in slow), return_exceptions=True)
        answer = answer_of(here.version, num_tokens)
        num_ended, num_left = numbers_of(here)
        assert 0 < num_ended == num_left < num_slow
        assert sum(isinstance(end, Exception) for end in ends) == num_ended
        assert [stream.text for stream in slow].count(answer) == num_slow - num_ended
        assert other.text == answer


@pytest.mark.slow
async def test_client_that_reads_again_is_counted_no_more() -> None:
    async with served(unread=SOON, **NOT_HELD) as here:
        link = ScriptedLink(here.version.dispatcher)
        slow, other = here.ask(1600), here.ask(1600)
        await here.until_direct(link, 2)
        for _ in range(4):
            slow.may_read.clear()
            for _ in range(300):
                num_parts = len(other.parts)
                link.step()
                await here.until(lambda n=num_parts: len(other.parts) > n)
            slow.may_read.set()
            await here.until(lambda: slow.text == other.text)
        link.step(1600)
        await whole(slow)
        await whole(other)
        assert slow.text == other.text == answer_of(here.version, 1600)
        assert numbers_of(here) == (0, 0)
