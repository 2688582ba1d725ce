"""The polite clients of the ingress benchmark: a closed loop of chat streams, as SDKs behave.

Owns asking, asking again when refused, and what came of it. A refusal with `Retry-After` is obeyed
and no failure: the time to the first token begins with the first try. Whatever else is not a whole
answer is a failure.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from serving.telemetry.loop_turns import LoopTurns

NUM_STREAMS = 16
OUTPUT_TOKENS = 50
# With the template of the shipped model about 64 tokens; the record has what the server counted.
_PROMPT = (
    "Slice {number} of run {seed}: which hosts wait, and for what do they wait? Say first what a "
    "slice is, and then which hosts it has, how many chips are on each, and what they do when one "
    "is lost."
)
# How long a request may take that began before the end, refusals included.
_PATIENCE_S = 60.0
_DEFAULT_RETRY_S = 1.0
_REFUSED = (429, 503)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: Sequence[_Choice] = ()
    usage: _Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class BrokenAnswerError(Exception):
    """Reports an answer that is not what was asked for; the message says in what."""


@dataclass(slots=True)
class Seen:
    """What the clients saw. Times in seconds; `ttft_s` and `longest_gap_s` of each whole answer.

    `refusals` counts refused tries by status, `failures` requests by what went wrong.
    `longest_turn_s` is the client's own: no figure is finer than that.
    """

    ttft_s: list[float] = field(default_factory=list)
    longest_gap_s: list[float] = field(default_factory=list)
    prompt_tokens: set[int] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    longest_turn_s: float = 0.0


async def ask_politely(url: str, model: str, *, seed: int, window_s: float) -> Seen:
    """Keeps `NUM_STREAMS` streams open for `window_s`, and returns once all have ended."""
    seen, turns = Seen(), LoopTurns()
    until_s = time.monotonic() + window_s
    numbers = itertools.count()
    turns.start()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(url, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(NUM_STREAMS):
            group.create_task(_ask_on(session, model, seed, numbers, until_s, seen))
    seen.longest_turn_s = turns.longest_s
    turns.stop()
    return seen


async def _ask_on(
    session: aiohttp.ClientSession,
    model: str,
    seed: int,
    numbers: Iterator[int],
    until_s: float,
    seen: Seen,
) -> None:
    # Once in any case: on a machine that is busy the window may be over before a stream begins.
    while (number := next(numbers)) < NUM_STREAMS or time.monotonic() < until_s:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": _PROMPT.format(number=number, seed=seed)}],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with asyncio.timeout(until_s + _PATIENCE_S - time.monotonic()):
                await _ask(session, body, seen)
        except (aiohttp.ClientError, OSError, TimeoutError, BrokenAnswerError) as error:
            seen.failures[f"{type(error).__name__}: {error}"[:120]] += 1
            await asyncio.sleep(_DEFAULT_RETRY_S)  # a server that is gone is not asked in a loop


async def _ask(session: aiohttp.ClientSession, body: dict[str, object], seen: Seen) -> None:
    """Asks until it is answered."""
    began_s = time.perf_counter()
    while True:
        async with session.post("/v1/chat/completions", json=body) as response:
            if response.status == 200:
                await _read(response, began_s, seen)
                return
            text = await response.text()
            if response.status not in _REFUSED or "Retry-After" not in response.headers:
                raise BrokenAnswerError(f"{response.status}: {text}")
            seen.refusals[str(response.status)] += 1
            retry_s = float(response.headers["Retry-After"])
        await asyncio.sleep(retry_s)


async def _read(response: aiohttp.ClientResponse, began_s: float, seen: Seen) -> None:
    times_s: list[float] = []
    usage: _Usage | None = None
    is_ended = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            is_ended = True
            continue
        chunk = _CHUNK.decode(line[len(b"data: ") :])
        usage = chunk.usage or usage
        if any(choice.delta.content for choice in chunk.choices):
            times_s.append(time.perf_counter())
    if not is_ended or usage is None or usage.completion_tokens != OUTPUT_TOKENS or not times_s:
        raise BrokenAnswerError(f"a stream ended early, after {len(times_s)} events")
    seen.prompt_tokens.add(usage.prompt_tokens)
    seen.ttft_s.append(times_s[0] - began_s)
    gaps = [after - before for before, after in itertools.pairwise(times_s)]
    seen.longest_gap_s.append(max(gaps, default=0.0))
