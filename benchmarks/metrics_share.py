"""Which part of a busy gateway's CPU time our metrics take, by a stopwatch inside of them.

`benchmarks.metrics` compares gateways with and without; what it finds is the truth about the whole,
within the noise of the machine, which on shared cores is several per cent. Here every method of a
meter is timed where it runs, so the share is found in one and the same run. What the stopwatch
finds around a method that does nothing is measured in between, and taken off. What a method does to
the caches of others is missed.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import metrics
from serving.engine.paced import PacedEngine
from serving.gateway.request_meter import Arrival, EdgeMeter, RequestMeter

NUM_ROUNDS = 24
_EMPTY_CALLS = 2000

_TIMED = {
    RequestMeter: ("taken", "trace", "dispatched", "emitted", "found_cached", "ended"),
    EdgeMeter: ("judged", "answered"),
    Arrival: ("written", "answered"),
    PacedEngine: ("_count",),
}


@dataclass(slots=True)
class Stopwatch:
    """Nanoseconds inside of meters, and how often one was called."""

    spent_ns: int = 0
    num_calls: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of CPU of all rounds, and of them those inside of meters and of scrapes."""

    whole_s: float
    meters_s: float
    scrapes_s: float
    num_calls: int
    num_tokens: int


async def run() -> Share:
    """Rounds of a gateway with our metrics, after some to warm up."""
    watch = Stopwatch()
    whole_s = scrapes_s = 0.0
    with _timed(watch):
        async with metrics.way(has_ours=True, has_vllms=False) as ours:
            assert ours.scrape is not None
            bare = metrics.Way(ours.edge, None)
            for number in range(metrics.WARM_UP_ROUNDS):
                await metrics.cpu_s(bare, number)
            watch.spent_ns = watch.num_calls = 0
            empty_ns = 0
            for number in range(NUM_ROUNDS):
                empty_ns += _of_nothing(_EMPTY_CALLS)
                whole_s += await metrics.cpu_s(bare, number)
                if number % metrics.ROUNDS_PER_SCRAPE == 0:
                    started_s = time.process_time()
                    await ours.scrape()
                    scrapes_s += time.process_time() - started_s
    num_tokens = NUM_ROUNDS * metrics.ROUND_TOKENS
    return Share(whole_s + scrapes_s, watch.spent_ns / 1e9, scrapes_s, watch.num_calls, num_tokens)


def _of_nothing(num_calls: int) -> int:
    """Nanoseconds that a stopwatch finds around a method that does nothing."""
    watch = Stopwatch()
    timed = _with(watch, _nothing)
    for _ in range(num_calls):
        timed(None, 1, 1.0)
    return watch.spent_ns


def _nothing(meter: None, num_tokens: int, now_s: float) -> None:
    pass


def report(share: Share) -> str:
    """One line."""
    inside_s = share.meters_s + share.scrapes_s
    return (
        f"In our metrics {100 * inside_s / share.whole_s:.2f} % of the CPU time "
        f"({100 * share.scrapes_s / share.whole_s:.2f} % in scrapes); "
        f"{share.meters_s / share.num_tokens * 1e6:.2f} µs of "
        f"{share.whole_s / share.num_tokens * 1e6:.1f} µs for each token, "
        f"in {share.num_calls / share.num_tokens:.1f} calls."
    )


@contextmanager
def _timed(watch: Stopwatch) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner in _TIMED for name in _TIMED[owner]]
    for owner, name, method in originals:
        setattr(owner, name, _with(watch, method))
    try:
        yield
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


def _with(watch: Stopwatch, method: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.perf_counter_ns

    @functools.wraps(method)
    def timed(*args: Any) -> Any:
        began_ns = clock()
        found = method(*args)
        watch.spent_ns += clock() - began_ns
        watch.num_calls += 1
        return found

    return timed
