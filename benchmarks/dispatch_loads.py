"""Made-up loads over simulated engines: a hot beginning, prompts by chance, many engines.

As `dispatch_trace`, but for the requests. Held against each other are the ways to choose, and one
gateway against many.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.dispatch_baselines import Asked
from benchmarks.dispatch_trace import Submit, choosing_fleet, ttft_quantiles_s
from serving.engine.paced.config import PacedConfig
from tests.gateway.dispatch.simulated_fleet import CHIP, CHIP_WITH_CACHE, SimulatedFleet
from tests.gateway.dispatch.simulated_network import run_on_network

_LOOK_S = 0.5
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at a rate. Each begins with a shared beginning by chance, if there are some.

    `hot_share` of all begin with the first of `num_shared`, each of `shared_tokens`.
    """

    name: str
    num_engines: int
    num_requests: int
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    engine: PacedConfig = CHIP
    num_shared: int = 0
    shared_tokens: int = 0
    hot_share: float = 0.0


HOT = Load("hot beginning", 8, 3000, 30.0, 400, 60, CHIP_WITH_CACHE, 64, 6000, 0.3)
BUSY = replace(HOT, name="hot beginning, three times as often", requests_per_s=90.0)
CHANCE = Load("prompts by chance", 8, 3000, 60.0, 1500, 100)
LONG = Load("an engine dies", 8, 1500, 15.0, 400, 400, CHIP_WITH_CACHE, 64, 6000, 0.3)
MANY = Load("64 engines", 64, 12_000, 480.0, 1500, 100)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """One run.

    `spread` is the mean, over the run, of the most sequences that an engine has over the mean of
    all; `work_spread` the most tokens that one computed in the whole run over the mean. `num_moved`
    streams lost their engine; half of them stood still for `pause_p50_s` or less.
    """

    load: str
    kind: str
    num_gateways: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    cached_ratio: float
    spread: float
    work_spread: float
    num_moved: int
    pause_p50_s: float | None


def run(load: Load, kind: str, num_gateways: int, dies_after: float | None = None) -> LoadOutcome:
    """Runs a load whole; an engine dies after that share of the requests."""
    outcomes: list[LoadOutcome] = []

    async def main() -> None:
        building = choosing_fleet(kind, num_gateways, load.num_engines, load.engine)
        async with building as (fleet, gateways):
            spreads: list[float] = []
            looking = asyncio.create_task(_look(fleet, spreads))
            dying = (
                None if dies_after is None else asyncio.create_task(_die(load, fleet, dies_after))
            )
            await send(load, gateways)
            if dying is not None:
                await dying
            looking.cancel()
            await fleet.until_done()
            outcomes.append(_outcome(load, kind, num_gateways, fleet, spreads))

    run_on_network(main())
    return outcomes[0]


async def send(load: Load, gateways: Sequence[Submit]) -> None:
    """Sends all requests of a load, each to some gateway."""
    loop, chance = asyncio.get_running_loop(), random.Random(3)
    at_s = loop.time()
    for number, (prompt, blocks) in enumerate(_prompts(load, chance)):
        at_s += chance.expovariate(load.requests_per_s)
        await asyncio.sleep(at_s - loop.time())
        output = 1 + int(chance.expovariate(1 / load.output_tokens))
        chance.choice(gateways)(f"r{number}", prompt, output, Asked(blocks[0], blocks))


async def _die(load: Load, fleet: SimulatedFleet, after: float) -> None:
    """Ends the first engine, as a host that goes does: its links break."""
    await asyncio.sleep(after * load.num_requests / load.requests_per_s)
    await fleet.servers[0].close()


def _prompts(load: Load, chance: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Yields prompts, each with names of its blocks: shared ones are named by their beginning."""
    shared = [chance.choices(range(256), k=load.shared_tokens) for _ in range(load.num_shared)]
    for number in range(load.num_requests):
        own = chance.choices(
            range(256), k=load.prompt_tokens // 2 + chance.randrange(load.prompt_tokens)
        )
        names = [1_000_000 + number]
        if not shared:
            yield own, names
            continue
        which = 0 if chance.random() < load.hot_share else chance.randrange(load.num_shared)
        num_blocks = load.shared_tokens // _BLOCK
        yield shared[which] + own, [1000 * which + at for at in range(num_blocks)] + names


async def _look(fleet: SimulatedFleet, spreads: list[float]) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        loads = [engine.load.num_running + engine.load.num_waiting for engine in fleet.engines]
        mean = sum(loads) / len(loads)
        if mean >= 1:
            spreads.append(max(loads) / mean)


def _outcome(
    load: Load, kind: str, num_gateways: int, fleet: SimulatedFleet, spreads: list[float]
) -> LoadOutcome:
    assert not any(gateway.failures for gateway in fleet.gateways)
    stats = [engine.engine_stats for engine in fleet.engines]
    work = [
        each.prompt_tokens - each.local_cached_tokens + each.generation_tokens for each in stats
    ]
    pauses = sorted(each.pause_s for each in fleet.answers if each.pause_s is not None)
    return LoadOutcome(
        load.name,
        kind,
        num_gateways,
        *ttft_quantiles_s(fleet),
        fleet.cached_ratio,
        sum(spreads) / len(spreads),
        max(work) / (sum(work) / len(work)),
        len(pauses),
        pauses[len(pauses) // 2] if pauses else None,
    )


def outcomes(report: Callable[[LoadOutcome], None]) -> None:
    """Runs all, and reports each as it ends."""
    for num_gateways in (1, 4, 16):
        for kind in ("fewest requests", "room and cache", "own prefix tree"):
            report(run(HOT, kind, num_gateways))
    report(run(BUSY, "fewest requests", 1))
    for num_gateways in (1, 4, 16):
        report(run(BUSY, "room and cache", num_gateways))
    for kind in ("fewest requests", "room and cache"):
        report(run(CHANCE, kind, 1))
    for num_gateways in (1, 16):
        report(run(MANY, "room and cache", num_gateways))
    for kind in ("fewest requests", "room", "room and cache"):
        report(run(LONG, kind, 4, dies_after=0.5))


HEAD = (
    "| load | gateways | chosen by | TTFT p50 s | p90 | p99 | cached | sequences | work "
    "| moved, pause p50 s |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def row(each: LoadOutcome) -> str:
    """Returns one outcome as a row in Markdown."""
    pause = "" if each.pause_p50_s is None else f"{each.num_moved}, {each.pause_p50_s:.3f}"
    return (
        f"| {each.load} | {each.num_gateways} | {each.kind} | {each.ttft_p50_s:.3f} "
        f"| {each.ttft_p90_s:.3f} | {each.ttft_p99_s:.3f} | {each.cached_ratio:.3f} "
        f"| {each.spread:.2f} | {each.work_spread:.2f} | {pause} |"
    )
