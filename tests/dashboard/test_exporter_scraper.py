"""The chips on the fleet page: pages over HTTP, of hosts that answer and of hosts that do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

import pytest

from serving.dashboard.exporter_scraper import (
    MAX_HOSTS,
    MAX_PAGE_BYTES,
    ExporterScraper,
    chip_samples,
)
from serving.dashboard.history import History, Wanted
from serving.domain.dashboard_messages import GatewaySample

PAGE = """\
# HELP tpu_duty_cycle_ratio Share of the runtime's last sample period in which the device was busy
# TYPE tpu_duty_cycle_ratio gauge
tpu_duty_cycle_ratio{slice="s",chip="0",model="chat"} 0.25
tpu_duty_cycle_ratio{slice="s",chip="1",model="chat"} 0.75
tpu_hbm_used_bytes{slice="s",chip="0",model="chat"} 8e+09
tpu_hbm_capacity_bytes{slice="s",chip="0",model="chat"} 3.2e+10
tpu_scrape_collector_success{collector="libtpu"} 1
"""


@asynccontextmanager
async def exporter(answer: Callable[[], bytes]) -> AsyncIterator[int]:
    """An exporter on this machine that says what it is told to; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def ok(page: str) -> bytes:
    return f"HTTP/1.0 200 OK\r\nContent-Length: {len(page)}\r\n\r\n{page}".encode()


def shown(reader: ExporterScraper) -> dict[str, list[float]]:
    history = History("d", 0.0, reader.read)
    history.take(GatewaySample("g", 0.0), 1000.5)
    ratios = history.describe(Wanted(1, "chat"))["series"].get("tpu_ratio", {})
    return {label: points[-1] for label, points in ratios.items()}


def at(*addresses: str) -> Callable[[], Awaitable[Collection[str]]]:
    async def listed() -> Collection[str]:
        return addresses

    return listed


async def test_chips_of_a_host_that_answers_are_shown() -> None:
    async with exporter(lambda: ok(PAGE)) as port:
        reader = ExporterScraper(port, at("127.0.0.1"))
        assert shown(reader) == {}
        await reader.scrape_once()
    assert shown(reader) == {"duty_cycle": 0.5, "hbm": 0.25}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 500 no\r\n\r\n",
        b"nonsense\r\n\r\n",
        ok('tpu_duty_cycle_ratio{chip="0} 1\n'),
        ok('tpu_duty_cycle_ratio{chip="0"} much\n'),
        b"HTTP/1.0 200 OK\r\nContent-Length: 900\r\n\r\ntpu_duty",
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe",
        ok(PAGE + "#" * MAX_PAGE_BYTES),
    ],
    ids=range(7),
)
async def test_host_that_answers_anything_else_shows_nothing(answer: bytes) -> None:
    async with exporter(lambda: answer) as port:
        reader = ExporterScraper(port, at("127.0.0.1"))
        await reader.scrape_once()
    assert shown(reader) == {}


async def test_host_without_exporter_is_passed_over() -> None:
    async with exporter(lambda: ok(PAGE)) as port:
        reader = ExporterScraper(port, at("127.0.0.1", "127.0.0.2"))
        await reader.scrape_once()
    assert shown(reader)["duty_cycle"] == 0.5


async def test_host_that_is_gone_is_shown_no_longer_and_too_many_are_not_asked() -> None:
    addresses = ["127.0.0.1"]
    async with exporter(lambda: ok(PAGE)) as port:

        async def listed() -> list[str]:
            return addresses

        reader = ExporterScraper(port, listed)
        await reader.scrape_once()
        assert shown(reader)
        addresses[:] = [f"127.1.0.{number}" for number in range(MAX_HOSTS + 1)]
        await reader.scrape_once()
    assert shown(reader) == {}


def test_only_what_is_drawn_is_parsed() -> None:
    assert {sample.name for sample in chip_samples(PAGE)} == {
        "tpu_duty_cycle_ratio",
        "tpu_hbm_used_bytes",
        "tpu_hbm_capacity_bytes",
    }
