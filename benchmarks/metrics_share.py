"""Which part of a busy gateway's CPU time our metrics take, by a stopwatch inside of them.

`benchmarks.metrics` compares gateways with and without; what it finds is the truth about the whole,
within the noise of the machine, which on shared cores is several per cent. Here every method
that counts or times is timed where it runs, so the share is found in one and the same run; what a
method looks at for the trace and the load window is in it. What the stopwatch
finds around a method that does nothing is measured in between, and taken off. What a method does to
the caches of others is missed.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import metrics
from serving.engine.paced.engine import PacedEngine
from serving.gateway.telemetry.request_metrics import EdgeMetrics
from serving.gateway.telemetry.request_telemetry import (
    ModelTelemetry,
    RequestContext,
    RequestTelemetry,
)

NUM_ROUNDS = 24
_EMPTY_CALLS = 2000

_OF_GATEWAY = {
    ModelTelemetry: ("arrived", "emitted"),
    RequestTelemetry: ("dispatched", "found_cached", "ended"),
    EdgeMetrics: ("record_admission", "answered"),
    RequestContext: ("written", "answered"),
}
_OF_ENGINE: Mapping[type, Sequence[str]] = {PacedEngine: ("_count",)}


@dataclass(slots=True)
class Stopwatch:
    """Nanoseconds inside of such methods, and how often one was called."""

    spent_ns: int = 0
    num_calls: int = 0

    def inside_s(self, per_call_ns: float) -> float:
        """Seconds, without what it finds around a method that does nothing."""
        return (self.spent_ns - per_call_ns * self.num_calls) / 1e9


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of CPU of all rounds, and of them those inside of such methods and of scrapes.

    The whole is client, gateway and engine; the engine's own sums run elsewhere in an application.
    """

    whole_s: float
    gateway_s: float
    engine_s: float
    scrapes_s: float
    num_tokens: int


async def run() -> Share:
    """Rounds of a gateway with our metrics, after some to warm up."""
    gateway, engine = Stopwatch(), Stopwatch()
    whole_s = scrapes_s = 0.0
    with _timed(gateway, _OF_GATEWAY), _timed(engine, _OF_ENGINE):
        async with metrics.way(has_ours=True, has_vllms=False) as ours:
            assert ours.scrape is not None
            bare = metrics.Way(ours.edge, None)
            for number in range(metrics.WARM_UP_ROUNDS):
                with contextlib.suppress(metrics.TokensJoinedError):
                    await metrics.cpu_s(bare, number)
            for watch in (gateway, engine):
                watch.spent_ns = watch.num_calls = 0
            empty_ns = 0
            for number in range(NUM_ROUNDS):
                empty_ns += _of_nothing(_EMPTY_CALLS)
                whole_s += await metrics.cpu_s(bare, number)
                if number % metrics.ROUNDS_PER_SCRAPE == 0:
                    started_s = time.process_time()
                    await ours.scrape()
                    scrapes_s += time.process_time() - started_s
    per_call_ns = empty_ns / (NUM_ROUNDS * _EMPTY_CALLS)
    return Share(
        whole_s + scrapes_s,
        gateway.inside_s(per_call_ns),
        engine.inside_s(per_call_ns),
        scrapes_s,
        NUM_ROUNDS * metrics.ROUND_TOKENS,
    )


def _of_nothing(num_calls: int) -> int:
    """Nanoseconds that a stopwatch finds around a method that does nothing."""
    watch = Stopwatch()
    timed = _with(watch, _nothing)
    for _ in range(num_calls):
        timed(None, 1, 1.0)
    return watch.spent_ns


def _nothing(numbers: None, num_tokens: int, now_s: float) -> None:
    pass


def report(share: Share) -> str:
    """One line."""
    parts = {
        "the gateway's numbers": share.gateway_s,
        "the engine's sums": share.engine_s,
        "scrapes": share.scrapes_s,
    }
    shares = ", ".join(
        f"{name} {seconds / share.num_tokens * 1e6:.2f} µs ({100 * seconds / share.whole_s:.2f} %)"
        for name, seconds in parts.items()
    )
    return f"Of {share.whole_s / share.num_tokens * 1e6:.1f} µs of CPU for each token: {shares}."


@contextmanager
def _timed(watch: Stopwatch, methods: Mapping[type, Sequence[str]]) -> Iterator[None]:
    originals = [
        (owner, name, getattr(owner, name)) for owner, names in methods.items() for name in names
    ]
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
