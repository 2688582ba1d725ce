"""Made-up loads over simulated engines: a hot beginning, prompts by chance, many engines.

As `dispatch_trace`, but for the requests. Held against each other are the ways to choose, and one
gateway against many.
"""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.dispatch_baselines import Asked
from benchmarks.dispatch_trace import (
    ALL_KNOWN,
    ENGINES,
    Submit,
    choosing_fleet,
    latency_s,
    ttft_quantiles_s,
)
from serving.engine.paced.config import PacedConfig
from tests.gateway.dispatch.simulated_fleet import (
    CHIP,
    CHIP_WITH_CACHE,
    Answer,
    SimulatedFleet,
    prompt_of,
)
from tests.gateway.dispatch.simulated_network import LATENCY_S, run_on_network

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


KINDS_OF_HOT = (
    *("fewest requests", "room and cache", "session", "hash of the session"),
    "own prefix tree",
)
HOT = Load("hot beginning", 8, 3000, 30.0, 400, 60, CHIP_WITH_CACHE, 64, 6000, 0.3)
BUSY = replace(HOT, name="hot beginning, three times as often", requests_per_s=90.0)
CHANCE = Load("prompts by chance", 8, 3000, 60.0, 1500, 100)
LONG = Load("an engine dies", 8, 1500, 15.0, 400, 400, CHIP_WITH_CACHE, 64, 6000, 0.3)
MANY = Load("64 engines", 64, 12_000, 480.0, 1500, 100)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Streams that lost their engine; half of them stood still for `p50_s` or less.

    `which` of them they are: all, or those that went where most of them was cached, or was not.
    """

    which: str
    count: int
    p50_s: float


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """One run.

    `spread` is the mean, over the run, of the most sequences that an engine has over the mean of
    all, `least_spread` what it would be if as many were on all engines as evenly as whole ones can
    be; `work_spread` the most tokens that one computed in the whole run over the mean. `pauses` are
    those of streams that lost their engine.
    """

    load: str
    kind: str
    num_gateways: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    cached_ratio: float
    spread: float
    least_spread: float
    work_spread: float
    pauses: tuple["Pauses", ...] = ()


def run(load: Load, kind: str, num_gateways: int, dies_after: float | None = None) -> LoadOutcome:
    """Runs a load whole; an engine dies after that share of the requests."""
    outcomes: list[LoadOutcome] = []

    async def main() -> None:
        building = choosing_fleet(kind, num_gateways, load.num_engines, load.engine)
        async with building as (fleet, gateways):
            spreads: list[tuple[float, float]] = []
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

    run_on_network(main(), latency_s(kind))
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


async def _look(fleet: SimulatedFleet, spreads: list[tuple[float, float]]) -> None:
    """Notes every so often the largest load over the mean, and the least that it can be."""
    while True:
        await asyncio.sleep(_LOOK_S)
        loads = [engine.load.num_running + engine.load.num_waiting for engine in fleet.engines]
        mean = sum(loads) / len(loads)
        if mean >= 1:
            spreads.append((max(loads) / mean, math.ceil(mean) / mean))


def _outcome(
    load: Load,
    kind: str,
    num_gateways: int,
    fleet: SimulatedFleet,
    spreads: list[tuple[float, float]],
) -> LoadOutcome:
    assert not any(gateway.failures for gateway in fleet.gateways)
    stats = [engine.engine_stats for engine in fleet.engines]
    work = [
        each.prompt_tokens - each.local_cached_tokens + each.generation_tokens for each in stats
    ]
    return LoadOutcome(
        load.name,
        kind,
        num_gateways,
        *ttft_quantiles_s(fleet),
        fleet.cached_ratio,
        statistics.fmean(spread for spread, _ in spreads),
        statistics.fmean(least for _, least in spreads),
        max(work) / (sum(work) / len(work)),
        tuple(_pauses(fleet.answers)),
    )


def _pauses(answers: Sequence[Answer]) -> Iterator[Pauses]:
    """Yields the pauses of all that moved, and of each half of which something is known."""
    all_of: dict[str, list[float]] = {"": [], "cached": [], "not cached": []}
    for answer in answers:
        if answer.pause_s is None:
            continue
        all_of[""].append(answer.pause_s)
        if (ratio := answer.moved_cached_ratio) is not None:
            all_of["cached" if ratio >= 0.5 else "not cached"].append(answer.pause_s)
    for which, pauses_s in all_of.items():
        if pauses_s:
            yield Pauses(which, len(pauses_s), sorted(pauses_s)[len(pauses_s) // 2])


def outcomes(report: Callable[[LoadOutcome], None]) -> None:
    """Runs all, and reports each as it ends."""
    for num_gateways in (1, 4, 16):
        for kind in KINDS_OF_HOT:
            report(run(HOT, kind, num_gateways))
    report(run(HOT, ALL_KNOWN, 1))
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
    "| load | gateways | chosen by | TTFT p50 s | p90 | p99 | cached | sequences | at least "
    "| work | moved, pause p50 s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(each: LoadOutcome) -> str:
    """Returns one outcome as a row in Markdown."""
    pause = "; ".join(f"{of.which} {of.count}, {of.p50_s:.3f}".strip() for of in each.pauses)
    return (
        f"| {each.load} | {each.num_gateways} | {each.kind} | {each.ttft_p50_s:.3f} "
        f"| {each.ttft_p90_s:.3f} | {each.ttft_p99_s:.3f} | {each.cached_ratio:.3f} "
        f"| {each.spread:.2f} | {each.least_spread:.2f} | {each.work_spread:.2f} | {pause} |"
    )


# -- an engine that comes while others have a long line --

_LATE_REQUESTS, _LATE_AFTER_S, _LATE_LOOK_S = 2000, 0.5, 1.0


@dataclass(frozen=True, slots=True)
class LateEngine:
    """What a second engine has of a line of 2,000 that stood when it came.

    Its first token came `first_token_s` after it did, `None` if it got none of them. After a second
    it had been given `num_given_in_1_s` of them, the first engine `num_given_to_first` meanwhile.
    The last answer ended `done_s` after it came.
    """

    kind: str
    num_requests: int
    first_token_s: float | None
    num_given_in_1_s: int
    num_given_to_first: int
    done_s: float


def late_engine(kind: str, num_requests: int = _LATE_REQUESTS) -> LateEngine:
    """Runs one, through one gateway that chooses by `kind`, one of `ENGINES`."""
    outcomes: list[LateEngine] = []

    async def main() -> None:
        loop, chance = asyncio.get_running_loop(), random.Random(5)
        async with choosing_fleet(kind, 1, 1, CHIP) as (fleet, _):
            (gateway,) = fleet.gateways
            for number in range(num_requests):
                gateway.submit(f"r{number}", prompt_of(100, chance), 50)
            await asyncio.sleep(_LATE_AFTER_S)
            await fleet.add_engine(ENGINES[kind](CHIP))
            came_s = loop.time()
            first, second = gateway.dispatcher.connections
            given_before = first.num_dispatched
            first_token_s: float | None = None
            given: tuple[int, int] | None = None
            while gateway.dispatcher.num_in_flight:
                await asyncio.sleep(LATENCY_S)
                passed_s = loop.time() - came_s
                if first_token_s is None and second.last_output_s > 0:
                    first_token_s = passed_s
                if given is None and passed_s >= _LATE_LOOK_S:
                    given = second.num_dispatched, first.num_dispatched - given_before
            outcomes.append(
                LateEngine(
                    kind, num_requests, first_token_s, *(given or (0, 0)), loop.time() - came_s
                )
            )

    run_on_network(main())
    return outcomes[0]


LATE_HEAD = (
    "| chosen by | its first token after s | given to it within 1 s | to the first one meanwhile "
    "| all done after s |\n|---|---|---|---|---|"
)


def late_row(each: LateEngine) -> str:
    """Returns one outcome as a row in Markdown."""
    first = "never" if each.first_token_s is None else f"{each.first_token_s:.3f}"
    return (
        f"| {each.kind} | {first} | {each.num_given_in_1_s} | {each.num_given_to_first} "
        f"| {each.done_s:.1f} |"
    )
