"""The benchmark of polite clients beside others: its clients, its tables, and a small run."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from benchmarks.ingress import Allowed, Disturbance, Pair, Phase, Run, Scale, measure
from benchmarks.ingress_disturbances import Kind, Order, disturbing, large_body
from benchmarks.ingress_polite import NUM_STREAMS, OUTPUT_TOKENS, ask_politely
from benchmarks.ingress_report import REPORT, Record, read_record, updated

DEADLINE_S = 30.0
Answer = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    """A server that hands each head to the test; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(await reader.readuntil(b"\r\n"), reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def body_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    return await reader.readexactly(length)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


USAGE = event(choices=[], usage={"prompt_tokens": 64, "completion_tokens": OUTPUT_TOKENS})
END = b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
WHOLE = OK + token("") + token("a") * OUTPUT_TOKENS + USAGE + END
REFUSAL = b"HTTP/1.1 503 No\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


async def test_polite_client_comes_again_when_it_is_told_and_its_wait_counts() -> None:
    bodies: list[bytes] = []

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await body_of(reader))
        writer.write(REFUSAL if len(bodies) <= NUM_STREAMS else WHOLE)

    async with serving(answer) as port:
        seen = await ask_politely(f"http://127.0.0.1:{port}", "m", seed=1, window_s=0.5)
    assert seen.refusals == {"503": NUM_STREAMS}
    assert seen.failures == {}
    assert len(seen.ttft_s) == NUM_STREAMS
    assert min(seen.ttft_s) > 1.0
    assert seen.prompt_tokens == {64}
    # The same was asked again, and nothing else.
    assert len(set(bodies)) == NUM_STREAMS


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (OK + token("a") * 3, "ended early, after 3 events"),
        (OK + token("a") * OUTPUT_TOKENS + USAGE, "ended early"),
        (REFUSAL.replace(b"retry-after: 1\r\n", b""), "503"),
        (REFUSAL.replace(b"503", b"500"), "500"),
        (b"", "disconnected"),
    ],
)
async def test_polite_client_whose_answer_is_not_whole_has_failed(sent: bytes, words: str) -> None:
    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader)
        writer.write(sent)

    async with serving(answer) as port:
        seen = await ask_politely(f"http://127.0.0.1:{port}", "m", seed=1, window_s=0.9)
    assert seen.ttft_s == []
    assert sum(seen.failures.values()) == NUM_STREAMS
    assert all(words in failure for failure in seen.failures)


@pytest.mark.parametrize("of_many", [False, True])
def test_body_is_valid_and_nearly_as_large_as_one_may_be(*, of_many: bool) -> None:
    body = large_body(100_000, of_many=of_many)
    assert 99_000 < len(body) <= 100_000
    messages = json.loads(body)["messages"]
    assert (len(messages) > 1000) == of_many
    assert {message["role"] for message in messages} == {"user"}


@pytest.mark.process
async def test_half_sent_requests_come_again_when_they_are_closed() -> None:
    num_come, come_again = 0, asyncio.Event()

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_come
        num_come += 1
        if num_come <= 20:
            writer.write(b"HTTP/1.1 408 Request Time-out\r\n\r\n")
            return
        if num_come == 40:
            come_again.set()
        # The rest of the head never comes.
        assert b"\r\n\r\n" not in await reader.read()

    async with serving(answer) as port:
        async with disturbing(Order(Kind.HALF_SENT, port, 20)) as disturbers:
            async with asyncio.timeout(DEADLINE_S):
                await come_again.wait()
        assert disturbers.became == {"408": 20, "open at the end": 20}


@pytest.mark.process
@pytest.mark.parametrize("kind", [Kind.SLOW_READERS, Kind.QUICK_READERS])
async def test_slow_readers_leave_what_quick_ones_read(kind: Kind) -> None:
    num_taken = 0
    sent = 4 * 2**20

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_taken
        body = json.loads(await body_of(reader))
        assert body["stream"]
        assert body["model"] == "slow"
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * sent)
        with suppress(TimeoutError):
            # A reader that does not read is not waited for: this ends when it leaves.
            await writer.drain()
            num_taken += 1

    async with serving(answer) as port:
        async with disturbing(Order(kind, port, 4)) as disturbers:
            if kind is Kind.QUICK_READERS:
                async with asyncio.timeout(DEADLINE_S):
                    while num_taken < 4:  # noqa: ASYNC110 - a count has no event
                        await asyncio.sleep(0.01)
        num_read = disturbers.became.pop("bytes read")
    if kind is Kind.QUICK_READERS:
        assert num_read > sent
        assert sum(disturbers.became.values()) == 4
    else:
        assert num_read < 1000
        assert disturbers.became == {"200": 4}


@pytest.mark.process
async def test_bodies_are_sent_again_and_half_of_them_slowly() -> None:
    came_again = asyncio.Event()
    num_whole = 0

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_whole
        json.loads(await body_of(reader))
        num_whole += 1
        if num_whole == 6:
            came_again.set()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(answer) as port:
        order = Order(Kind.SLOW_BODIES, port, 4, 4 * 2**20)
        async with disturbing(order) as disturbers:
            async with asyncio.timeout(DEADLINE_S):
                await came_again.wait()
    assert disturbers.became["quick: 400"] >= 4
    assert disturbers.became["slow: under way at the end"] == 2


def phase(p50_ms: float, p99_ms: float, **changes: object) -> Phase:
    made = Phase(
        num_whole=100,
        ttft_ms=(p50_ms, p99_ms),
        gap_ms=40.0,
        refusals={},
        failures={},
        client_turn_ms=0.0,
        gateway_turn_ms=12.0,
        memory_mib={"gateway": 500.0, "HAProxy": 50.0},
        tcp_mib=1.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def record(*pairs: Pair, kind: Kind = Kind.BODIES) -> Record:
    before, after = {"gateway": 400.0, "HAProxy": 20.0}, {"gateway": 450.0, "HAProxy": 30.0}
    disturbance = Disturbance(kind, 4, 16 * 2**20, list(pairs), before, after)
    run = Run(Scale(), Allowed(7920, 7425, 10), (64, 65), [disturbance])
    return Record("2026-11-24", "abc", "python -m benchmarks ingress", "2 cores", "3.11", run)


PAGE = "before\n<!-- begin: measured -->old<!-- end: measured -->\nafter\n"


def test_page_has_the_median_ratio_of_the_pairs_and_their_range() -> None:
    pairs = [
        Pair(phase(60.0, 80.0), phase(60.0 * times, 160.0 * times), {"quick: 400": 3})
        for times in (1.0, 3.0, 2.0)
    ]
    page = updated(PAGE, record(*pairs))
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert (
        "| 4 bodies at once, of 16 MiB each | **2.00** (1.00 to 3.00) | **4.00** (2.00 to 6.00) "
        "| 60 / 80 | 120 / 320 | 300 / 300 | 0 | 0 |"
    ) in page
    assert "| 4 bodies at once, of 16 MiB each | 9 quick: 400 |" in page
    assert "| 12 / 12 | 40 / 40 | 400 / 500 / 450 | 20 / 50 / 30 | 1 / 1 |" in page
    assert "7,920 connections accepted, 7,425 served" in page
    with pytest.raises(ValueError, match="begin: measured"):
        updated("no tables", record(*pairs))


def test_page_says_what_was_refused_and_what_failed_and_has_no_ratio_of_nothing() -> None:
    nothing = replace(
        phase(0.0, 0.0, num_whole=0, ttft_ms=None, gap_ms=None),
        refusals={"503": 7},
        failures={"500: a|b": 2},
    )
    page = updated(PAGE, record(Pair(phase(60.0, 80.0), nothing, {"408": 1000})))
    assert "| - | - | 60 / 80 | - | 100 / 0 | 7 503 | 2 500: a\\|b |" in page
    assert "| 1,000 408 |" in page


def test_page_is_what_the_record_says() -> None:
    page = REPORT.read_text(encoding="utf-8")
    assert updated(page, read_record()) == page


@pytest.mark.e2e
@pytest.mark.long
async def test_small_run_has_every_figure() -> None:
    scale = Scale(
        num_pairs=1,
        window_s=2.0,
        rest_s=0.0,
        max_connections=200,
        half_sent_ratio=0.5,
        num_readers=20,
        body_bytes=2**20,
    )
    noted: list[str] = []
    run = await measure(noted.append, scale, tuple(Kind))
    assert len(noted) == len(Kind)
    assert run.allowed == Allowed(200, 188, 10)
    assert 50 <= run.prompt_tokens[0] <= run.prompt_tokens[1] <= 80
    became = {}
    for disturbance in run.disturbances:
        (pair,) = disturbance.pairs
        became[disturbance.kind] = pair.became
        assert disturbance.memory_before_mib.keys() == {"gateway", "HAProxy"}
        for each in (pair.undisturbed, pair.disturbed):
            assert each.num_whole >= NUM_STREAMS
            assert each.failures == {}
            assert each.ttft_ms is not None
            assert each.ttft_ms[1] >= each.ttft_ms[0] >= 50.0
            assert each.memory_mib["gateway"] > 50.0
            assert each.memory_mib["HAProxy"] > 1.0
    assert became[Kind.HALF_SENT] == {"open at the end": 100}
    assert became[Kind.SLOW_READERS]["200"] == 20
    assert became[Kind.SLOW_READERS]["bytes read"] < became[Kind.QUICK_READERS]["bytes read"]
    # Too long for the model, or still read: the process that reads them starts with the first one.
    assert became[Kind.BODIES].keys() <= {"quick: 400", "quick: under way at the end"}
    assert sum(became[Kind.BODIES].values()) >= scale.num_bodies
