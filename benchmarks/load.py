"""A closed loop of streams against an OpenAI-compatible server, timed at the client.

Owns sending, timing and summing up. Does not own servers. One process on one event loop: above
about 10,000 chunks per second the client itself is what is measured.
"""

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class Stream:
    """One finished stream. Times in seconds; `gaps_s` between chunks that carry tokens."""

    ttft_s: float
    e2e_s: float
    num_tokens: int
    gaps_s: tuple[float, ...] = field(repr=False)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: `num_streams` at a time, `num_requests` in all, of `max_tokens` each."""

    num_streams: int
    num_requests: int
    max_tokens: int = 64
    prompt_words: int = 32


@dataclass(frozen=True, slots=True)
class Result:
    """All streams of one load, and how long the loop took."""

    streams: tuple[Stream, ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Output tokens in all."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole loop."""
        return self.num_tokens / self.wall_s

    def ttft_ms(self, percentile: int = 50) -> float:
        """Time to first token."""
        return _percentile([stream.ttft_s for stream in self.streams], percentile) * 1e3

    def tpot_ms(self, percentile: int = 50) -> float:
        """Time per output token."""
        return _percentile([stream.tpot_s for stream in self.streams], percentile) * 1e3


def _percentile(values: list[float], percentile: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percentile - 1]


async def run_load(url: str, model: str, load: Load, *, seed: int) -> Result:
    """Runs the loop. Raises `RuntimeError` when a stream fails: a wrong answer has no speed."""
    numbers = iter(range(load.num_requests))
    streams: list[Stream] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def worker() -> None:
            for number in numbers:
                stream = await _stream(session, _body(model, load, seed, number))
                streams.append(stream)

        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(load.num_streams):
                group.create_task(worker())
        wall_s = time.perf_counter() - started_s
    return Result(tuple(streams), wall_s)


def _body(model: str, load: Load, seed: int, number: int) -> dict[str, object]:
    # Distinct from the first word on, so that no request finds another's prefix in the cache.
    words = " ".join(f"{seed}-{number}-{index}" for index in range(load.prompt_words // 4))
    return {
        "model": model,
        "prompt": words,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _stream(session: aiohttp.ClientSession, body: dict[str, object]) -> Stream:
    started_s = time.perf_counter()
    arrivals_s: list[float] = []
    last = b""
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals_s.append(time.perf_counter())
                last = line
    usage = _CHUNK.decode(last[len(b"data: ") :]).usage
    if usage is None or usage.completion_tokens != body["max_tokens"]:
        raise RuntimeError(f"stream ended early: {last[:200]!r}")
    times_s = arrivals_s[:-1]  # the last chunk carries the usage, not a token
    gaps = tuple(after - before for before, after in itertools.pairwise(times_s))
    return Stream(
        ttft_s=times_s[0] - started_s,
        e2e_s=times_s[-1] - started_s,
        num_tokens=usage.completion_tokens,
        gaps_s=gaps,
    )
