"""Puts a server under a load: streams at once over connections of their own, timed as they read.

Owns the connections and the clock. How an answer is read is `chat_stream`, what is made of the
figures `reading`. One process on one event loop, and as little per read as Python allows, because
the client takes the cores that it shares with the server.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from benchmarks.side_by_side.chat_stream import ChatStream, WrongAnswerError
from benchmarks.side_by_side.loads import PROMPT_TOKENS, Load
from benchmarks.side_by_side.prompts import request_bytes

# What still runs at the end of the window is waited for, because its first token counts.
_DRAIN_S = 30.0
_CONNECTS_AT_ONCE = 64


@dataclass(slots=True)
class Seen:
    """What the client saw of one load; times in seconds, tokens and gaps of the window.

    `num_tokens` takes the tokens of an answer to be spread evenly over its events. `gaps_s` are
    between reads with tokens; `num_same_read` events came with another one in the same read.
    `ttft_s` are of the requests that were sent in the window. `errors` counts the requests that
    failed, of the whole load, by what was said. `num_answers` had a token in the window.
    """

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_same_read: int = 0
    num_events: int = 0
    num_tokens: float = 0.0
    num_answers: int = 0
    window_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


async def run_load(url: str, load: Load, seed: str, at_edge: Callable[[], None]) -> Seen:
    """Runs a load; `at_edge` is called where the counted window begins and where it ends.

    Raises:
        OSError: a connection could not be opened.
    """
    where = urlsplit(url)
    assert where.hostname is not None
    host, port = where.hostname, where.port or 80
    run = _Run(load)
    numbers = iter(range(1 << 30))
    loop = asyncio.get_running_loop()

    def next_request() -> bytes:
        return request_bytes(where.netloc, f"{seed}/{next(numbers)}", load.output_tokens)

    streams: list[_Stream] = []
    for start in range(0, load.streams, _CONNECTS_AT_ONCE):
        count = min(_CONNECTS_AT_ONCE, load.streams - start)
        connecting = (
            loop.create_connection(lambda: _Stream(run, next_request), host, port)
            for _ in range(count)
        )
        streams += [stream for _, stream in await asyncio.gather(*connecting)]
    try:
        await _run_streams(run, streams, at_edge)
    finally:
        for stream in streams:
            stream.close()
    return run.seen


async def _run_streams(run: "_Run", streams: "list[_Stream]", at_edge: Callable[[], None]) -> None:
    load = run.load
    if load.warmup_s == 0:
        at_edge()
    run.begin(time.perf_counter(), len(streams))
    for stream in streams:
        stream.send_next()
    if load.warmup_s:
        await asyncio.sleep(load.warmup_s)
        run.window_from_s = time.perf_counter()
        at_edge()
    if not load.is_burst:
        await asyncio.sleep(load.window_s)
        run.window_to_s = time.perf_counter()
        at_edge()
    await run.wait_ended()
    if load.is_burst:
        run.window_to_s = time.perf_counter()
        at_edge()
    run.seen.window_s = run.window_to_s - run.window_from_s


class _Run:
    """The state that all streams of a load share."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.seen = Seen()
        self.window_from_s = self.window_to_s = float("inf")
        self._num_running = 0
        self._ended = asyncio.Event()

    def begin(self, now_s: float, num_streams: int) -> None:
        if self.load.warmup_s == 0:
            self.window_from_s = now_s
        self._num_running = num_streams

    def counts(self, at_s: float) -> bool:
        return self.window_from_s <= at_s < self.window_to_s

    def has_more(self, now_s: float) -> bool:
        return not self.load.is_burst and now_s < self.window_to_s

    def end_one(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._ended.set()

    async def wait_ended(self) -> None:
        """Waits for the last answers; those that do not come in time are errors."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._ended.wait()
        except TimeoutError:
            self.seen.errors[f"not ended {_DRAIN_S:g} s after the window"] += self._num_running


class _Stream(asyncio.Protocol):
    """One connection: sends, reads the answer, sends again."""

    def __init__(self, run: _Run, next_request: Callable[[], bytes]) -> None:
        self._run = run
        self._next_request = next_request
        self._answer: ChatStream | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's has all that asyncio's has, and is no subclass of it.
        self._transport = cast("asyncio.Transport", transport)

    def send_next(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_counted = 0
        output_tokens = self._run.load.output_tokens
        self._answer = ChatStream(PROMPT_TOKENS, output_tokens, self._take_tokens)
        request = self._next_request()
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._answer is None:
            return
        try:
            is_whole = self._answer.feed(data, now_s)
        except WrongAnswerError as error:
            self._fail(str(error))
            return
        if is_whole:
            self._count_answer(self._answer)
            if self._run.has_more(now_s):
                self.send_next()
            else:
                self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")

    def close(self) -> None:
        """Closes the connection; what it still brings is nobody's."""
        self._is_over = True
        self._answer = None
        self._transport.close()

    def _take_tokens(self, now_s: float, num_events: int) -> None:
        run = self._run
        if self._first_s is None:
            self._first_s = now_s
            if run.counts(self._sent_s):
                run.seen.ttft_s.append(now_s - self._sent_s)
        elif run.counts(now_s):
            run.seen.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        if run.counts(now_s):
            run.seen.num_same_read += num_events - 1
            self._num_counted += num_events

    def _count_answer(self, answer: ChatStream) -> None:
        seen = self._run.seen
        output_tokens = self._run.load.output_tokens
        seen.num_events += self._num_counted
        seen.num_tokens += output_tokens * self._num_counted / answer.num_events
        seen.num_answers += self._num_counted > 0

    def _fail(self, words: str) -> None:
        """An error ends the stream: a server that fails has no more work than it can do."""
        if not self._is_over:
            self._run.seen.errors[words] += 1
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._answer = None
        self._run.end_one()
