"""How long a stream stands still when its engine dies: SIGKILL of an engine core under load."""

import asyncio
import functools
import itertools
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from tests.e2e.application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    engine_ids,
    linked_engines,
)

MODEL = "slicewise-demo"
NUM_KILLS = 5
NUM_STREAMS = 8
NUM_TOKENS = 1000
# Tokens that the first stream has when an engine dies: what is computed again, with the prompt.
KILL_AT = 200
_PROMPT = "Tell me about slice number {number}."
_REPLACED_S = 180.0
# What a lost engine had sent before comes within this time, far more than was ever seen.
_STILL_COMING_S = 0.5


@dataclass(frozen=True, slots=True)
class Pause:
    """One kill. Times in seconds.

    `moved_s` holds, for each stream that was moved, the time between the last chunk from the lost
    engine and the first one after it; `usual_s` is the longest gap of any stream until the kill;
    `prefill_s` is the time to first token of as long a prompt, with the streams running.
    """

    moved_s: tuple[float, ...]
    usual_s: float
    prefill_s: float


class _Arrivals:
    """When the chunks of one stream came, and a way to wait for a number of them."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._awaited: dict[int, asyncio.Event] = {}

    def note(self) -> None:
        self.times_s.append(time.monotonic())
        if event := self._awaited.get(len(self.times_s)):
            event.set()

    async def wait(self, count: int) -> None:
        if len(self.times_s) < count:
            await self._awaited.setdefault(count, asyncio.Event()).wait()

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each gap began, and how long it was."""
        pairs = itertools.pairwise(self.times_s)
        return [(earlier, later - earlier) for earlier, later in pairs]


async def _stream(
    session: aiohttp.ClientSession, number: int, num_tokens: int, arrivals: _Arrivals
) -> None:
    body = {
        "model": MODEL,
        "prompt": _PROMPT.format(number=number),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post("/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals.note()


async def _prefill_s(session: aiohttp.ClientSession, salt: int) -> float:
    """Time to first token of a prompt as long as what a moved request has to compute again."""
    body = {
        "model": MODEL,
        # Token ids, so that the length is exact, and new ones, so that no cache has them.
        "prompt": [(salt * 31 + at * 7) % 1000 + 10 for at in range(KILL_AT)],
        "max_tokens": 1,
        "temperature": 0,
    }
    started_s = time.monotonic()
    async with session.post("/v1/completions", json=body) as response:
        await response.read()
        assert response.status == 200
    return time.monotonic() - started_s


async def _kill_under_load(url: str, victim: psutil.Process, salt: int) -> Pause:
    arrivals = [_Arrivals() for _ in range(NUM_STREAMS)]
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(url, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        for number, each in enumerate(arrivals):
            group.create_task(_stream(session, number, NUM_TOKENS, each))
        await arrivals[0].wait(KILL_AT // 2)
        prefill_s = await _prefill_s(session, salt)
        await arrivals[0].wait(KILL_AT)
        os.kill(victim.pid, signal.SIGKILL)
        killed_s = time.monotonic()
    gaps = [each.gaps for each in arrivals]
    usual_s = max(gap for each in gaps for at_s, gap in each if at_s + gap < killed_s)
    # Half of the streams were on the engine that died; theirs are the long gaps over the kill.
    # Later ones belong to the start of the new engine, which takes a core for many seconds.
    over = sorted((_gap_over(each, killed_s) for each in gaps), reverse=True)
    return Pause(tuple(over[: NUM_STREAMS // 2]), usual_s, prefill_s)


def _gap_over(gaps: list[tuple[float, float]], killed_s: float) -> float:
    """The longest gap that the kill may have caused; 0 for a stream that had ended."""
    until_s = killed_s + _STILL_COMING_S
    return max((gap for at_s, gap in gaps if at_s < until_s and at_s + gap > killed_s), default=0.0)


async def run() -> list[Pause]:
    """Kills one of two vLLM engines under load, again and again, each time with both there."""
    pauses = []
    with RunningApplication(application_args(demo_model()), through="slicewise") as application:
        for salt in range(NUM_KILLS):
            before = engine_ids(application.fleet())
            victim = application.processes(Role.ENGINE_CORE)[salt % 2]
            # Warms both engines up, and the client.
            await _kill_free_round(application.base_url)
            pauses.append(await _kill_under_load(application.base_url, victim, salt))
            await asyncio.to_thread(
                application.wait_fleet,
                functools.partial(_is_replaced, before),
                _REPLACED_S,
            )
    return pauses


def _is_replaced(before: set[str], fleet: dict[str, Any]) -> bool:
    """Whether both engines are there, and not those from before."""
    return linked_engines(fleet) == {MODEL: 2} and engine_ids(fleet) != before


async def _kill_free_round(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        await asyncio.gather(
            *(_stream(session, number, 16, _Arrivals()) for number in range(NUM_STREAMS))
        )
