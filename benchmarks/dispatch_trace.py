"""A trace of conversations over simulated engines, by each way to choose among them.

Gateways' dispatchers, links, hosts and codecs are those of the product; the network, the clock and
the engines are simulated. Requests of the trace name their prompts' blocks of 512 tokens, so that
equal ones are equal tokens. Arrivals of the trace lie on a grid of 3 s, and are spread within it.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.dispatch_baselines import (
    Asked,
    Baseline,
    ConsistentHash,
    PrefixTree,
    SessionAffinity,
    pooled_ratio,
    sessions_of,
    uncached_at_least,
)
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from tests.gateway.dispatch.simulated_fleet import (
    BlindEngine,
    RoomOnlyEngine,
    SimulatedFleet,
    SimulatedGateway,
    quantile,
    simulated_fleet,
)
from tests.gateway.dispatch.simulated_network import LATENCY_S, run_on_network

# Takes a request: its id, its prompt, the tokens that are to come, and what a baseline chooses by.
Submit = Callable[[str, list[int], int, Asked], None]

NUM_ENGINES = 8
_BLOCK = 512
_GRID_S = 3.0
_PROMPT_TOKENS_PER_S = 8000.0
# Engines that compute 8,000 tokens of prompts a second, each with a cache of two million.
ENGINE = PacedConfig(
    time_per_token_s=0.012,
    tpot_per_seq_s=0.0002,
    prefill_tokens_per_s=_PROMPT_TOKENS_PER_S,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
    kv_cache_tokens=2_000_000,
    block_size=128,
)
# What engines tell, and so what gateways choose by.
ENGINES = {
    "fewest requests": BlindEngine,
    "room": RoomOnlyEngine,
    "room and cache": PacedEngine,
}
# As the last, where the gateway knows more than any can: how long answers will be, and what engines
# have cached at this moment, for the network takes no time. It is no bound: the rule is ours, which
# looks at each request by itself.
ALL_KNOWN = "all known"
# What others choose by: a new one for each gateway, of so many engines.
BASELINES: dict[str, Callable[[int], Baseline]] = {
    "session": lambda _: SessionAffinity(),
    "hash of the session": ConsistentHash,
    "own prefix tree": PrefixTree,
}
KINDS = (*ENGINES, *BASELINES)


def latency_s(kind: str) -> float:
    """Returns how long the network takes, one way, where gateways choose by this kind."""
    return 0.0 if kind == ALL_KNOWN else LATENCY_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `cached_ratio` is the share of the prompts' tokens that was cached."""

    kind: str
    num_gateways: int
    num_requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    whole_mean_s: float
    cached_ratio: float


def read_trace(path: Path, skip: int, count: int | None) -> list[dict[str, Any]]:
    """Returns the requests of a trace of Mooncake's form, without the first `skip`."""
    lines = path.read_text().splitlines()[skip:]
    return [json.loads(line) for line in lines[:count]]


def run(kind: str, num_gateways: int, rows: Sequence[dict[str, Any]]) -> Outcome:
    """Runs the whole trace."""
    outcomes: list[Outcome] = []
    run_on_network(_replay(kind, num_gateways, rows, outcomes), latency_s(kind))
    return outcomes[0]


async def _replay(
    kind: str, num_gateways: int, rows: Sequence[dict[str, Any]], outcomes: list[Outcome]
) -> None:
    chance = random.Random(1)
    due = _arrivals(rows, chance)
    in_order = [rows[number] for _, number in due]
    sessions = sessions_of([row["hash_ids"] for row in in_order])
    async with choosing_fleet(kind, num_gateways, NUM_ENGINES, ENGINE) as (fleet, gateways):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        prompts = _Prompts()
        for number, ((at_s, _), row, session) in enumerate(
            zip(due, in_order, sessions, strict=True)
        ):
            await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
            asked = Asked(session, row["hash_ids"])
            submit = chance.choice(gateways)
            submit(f"r{number}", prompts.of(row), row["output_length"], asked)
        await fleet.until_done()
        outcomes.append(_outcome(kind, num_gateways, fleet))


def _arrivals(rows: Sequence[dict[str, Any]], chance: random.Random) -> list[tuple[float, int]]:
    """When each request comes, after the first of the trace, and its number; in order."""
    first_ms = min(row["timestamp"] for row in rows)
    return sorted(
        ((row["timestamp"] - first_ms) / 1000 + chance.random() * _GRID_S, number)
        for number, row in enumerate(rows)
    )


@asynccontextmanager
async def choosing_fleet(
    kind: str, num_gateways: int, num_engines: int, engine: PacedConfig
) -> AsyncIterator[tuple[SimulatedFleet, list[Submit]]]:
    """A fleet whose gateways choose by this kind, and what takes each gateway's requests."""
    told = ENGINES | {ALL_KNOWN: PacedEngine}
    engines = [told.get(kind, BlindEngine)(engine) for _ in range(num_engines)]
    num_ours = num_gateways if kind in told else 0
    async with simulated_fleet(num_ours, engines, knows_lengths=kind == ALL_KNOWN) as fleet:
        ours = [_taken_by(gateway) for gateway in fleet.gateways]
        others = [
            await _baseline_gateway(fleet, number, BASELINES[kind](num_engines))
            for number in range(num_gateways - num_ours)
        ]
        yield fleet, ours + others


def _taken_by(gateway: SimulatedGateway) -> Submit:
    def submit(request_id: str, prompt: list[int], max_tokens: int, _: Asked) -> None:
        gateway.submit(request_id, prompt, max_tokens)

    return submit


async def _baseline_gateway(fleet: SimulatedFleet, number: int, baseline: Baseline) -> Submit:
    """Adds a gateway that chooses by itself: to each engine it has a link of its own."""
    ways = [SimulatedGateway(f"gw{number}-{engine}") for engine in range(len(fleet.servers))]
    for engine, (way, server) in enumerate(zip(ways, fleet.servers, strict=True)):
        await way.link(f"e{engine}", server.address)
    fleet.gateways += ways

    def submit(request_id: str, prompt: list[int], max_tokens: int, asked: Asked) -> None:
        engine = baseline.choose(asked, [way.dispatcher.num_in_flight for way in ways])
        ways[engine].submit(request_id, prompt, max_tokens)

    return submit


def ttft_quantiles_s(fleet: SimulatedFleet) -> tuple[float, float, float]:
    """Returns how long the first token took: the median, and what 90 and 99 of 100 stay below."""
    ttft_s = [answer.ttft_s for answer in fleet.answers]
    return quantile(ttft_s, 0.5), quantile(ttft_s, 0.9), quantile(ttft_s, 0.99)


class _Prompts:
    """The tokens of prompts: equal blocks are equal tokens."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}

    def of(self, row: Mapping[str, Any]) -> list[int]:
        prompt: list[int] = []
        for block in row["hash_ids"]:
            if block not in self._blocks:
                self._blocks[block] = random.Random(block).choices(range(256), k=_BLOCK)
            prompt += self._blocks[block]
        return prompt[: row["input_length"]]


def _outcome(kind: str, num_gateways: int, fleet: SimulatedFleet) -> Outcome:
    failed = sum(len(gateway.failures) for gateway in fleet.gateways)
    assert not failed, f"{failed} requests failed"
    answers = fleet.answers
    whole_s = [(answer.ended_at_s or 0.0) - answer.came_at_s for answer in answers]
    return Outcome(
        kind,
        num_gateways,
        len(answers),
        *ttft_quantiles_s(fleet),
        sum(whole_s) / len(whole_s),
        fleet.cached_ratio,
    )


def pooled(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the share of tokens that one cache of all engines' size would have found."""
    in_order = sorted(rows, key=lambda row: float(row["timestamp"]))
    tokens = [int(row["input_length"]) for row in in_order]
    return pooled_ratio([row["hash_ids"] for row in in_order], tokens, NUM_ENGINES)


def least_ttft_s(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Returns quantiles of the first token's time that no way to choose can come below.

    They are those of `ttft_quantiles_s`, of requests that never wait, of which each finds cached
    what any engine may have cached by then.
    """
    in_order = [rows[number] for _, number in _arrivals(rows, random.Random(1))]
    tokens = [int(row["input_length"]) for row in in_order]
    left = uncached_at_least([row["hash_ids"] for row in in_order], tokens)
    alone_s = [each / _PROMPT_TOKENS_PER_S for each in left]
    return quantile(alone_s, 0.5), quantile(alone_s, 0.9), quantile(alone_s, 0.99)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes as a table in Markdown."""
    head = "| gateways | chosen by | requests | TTFT p50 s | p90 | p99 | whole, mean s | cached |\n"
    rows = (
        f"| {each.num_gateways} | {each.kind} | {each.num_requests} | {each.ttft_p50_s:.2f} "
        f"| {each.ttft_p90_s:.2f} | {each.ttft_p99_s:.2f} | {each.whole_mean_s:.1f} "
        f"| {each.cached_ratio:.3f} |\n"
        for each in outcomes
    )
    return head + "|---|---|---|---|---|---|---|---|\n" + "".join(rows)
