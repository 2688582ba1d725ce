"""What it costs a gateway's loop to take a request and choose its engine, besides all else.

CPU time of `Dispatcher.submit` in this process, with engines that are told of room and of what they
have cached. Naming a prompt's blocks is timed by itself: it is done once for each request.
"""

import asyncio
import functools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.domain.tokens.block_hashes import first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, joined
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.link.messages import CacheSnapshot
from tests.gateway.engines import RecordingSink, ScriptedLink, in_flight

_PROMPT_TOKENS, _BLOCK, _PLACES = 32_000, 16, 256
_NUM_ENGINES = (1, 8, 64)
_NUM_TIMED = 200


@dataclass(frozen=True, slots=True)
class ChoiceCost:
    """CPU time per request in microseconds: the median, and what nine of ten stay below."""

    num_engines: int
    has_caches: bool
    median_us: float
    p90_us: float
    naming_us: float


async def measure(num_engines: int, *, has_caches: bool) -> ChoiceCost:
    """Times requests one after the other; each is over before the next comes."""
    chance = random.Random(num_engines)
    dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=600.0))
    RecordingSink(dispatcher)
    layout = CacheLayout.of_blocks(_BLOCK, first_parent()) if has_caches else None
    prompt = chance.choices(range(50_000), k=_PROMPT_TOKENS)
    links = []
    for number in range(num_engines):
        link = ScriptedLink(dispatcher, f"e{number}", places=_PLACES, cache_layout=layout)
        link.max_prompt_tokens = 2 * _PROMPT_TOKENS
        if layout is not None:
            # Each has another part of the prompt.
            part = prompt[: _PROMPT_TOKENS * (number + 1) // num_engines]
            link.on_cache(CacheSnapshot(joined(NamedBlocks(part).keys(layout)), is_first=True))
        links.append(link)
    taken_us, naming_us = [], []
    for number in range(_NUM_TIMED):
        blocks = NamedBlocks(prompt)
        if layout is not None:
            naming_us.append(_timed(functools.partial(_name_all, blocks, layout)))
        request = in_flight(dispatcher, f"r{number}", 100, prompt, blocks=blocks)
        taken_us.append(_timed(functools.partial(dispatcher.submit, request)))
        dispatcher.abort([f"r{number}"])
        chance.choice(links).tell()
    taken_us.sort()
    return ChoiceCost(
        num_engines,
        has_caches,
        statistics.median(taken_us),
        taken_us[len(taken_us) * 9 // 10],
        statistics.median(naming_us) if naming_us else 0.0,
    )


def run() -> list[ChoiceCost]:
    """Measures every number of engines, with caches that are known and without."""
    return [
        asyncio.run(measure(num_engines, has_caches=has_caches))
        for num_engines in _NUM_ENGINES
        for has_caches in (False, True)
    ]


def table(costs: list[ChoiceCost]) -> str:
    """Returns the costs as Markdown."""
    lines = ["| engines | caches | median | 90 % below | naming, once |", "|---|---|---|---|---|"]
    for cost in costs:
        known = "known" if cost.has_caches else "not known"
        named = f"{cost.naming_us:.0f} µs" if cost.has_caches else "-"
        lines.append(
            f"| {cost.num_engines} | {known} | {cost.median_us:.0f} µs | {cost.p90_us:.0f} µs"
            f" | {named} |"
        )
    return "\n".join(lines)


def _name_all(blocks: NamedBlocks, layout: CacheLayout) -> None:
    for _ in blocks.keys(layout):
        pass


def _timed(call: Callable[[], None]) -> float:
    started_ns = time.process_time_ns()
    call()
    return (time.process_time_ns() - started_ns) / 1000
