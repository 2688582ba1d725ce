"""What a gateway of the whole application computes for a request before its first token.

The application as `slicewise serve` starts it, behind HAProxy, with a paced engine whose first
token takes long. Rounds of streamed chats come at once; what the gateway's process has computed by
the time that the engine has all of them is what comes before the first token. A gateway computes
without requests too: each round follows as long a pause, whose CPU time is taken off.

`request_cost` measures the same of a gateway alone, whose caches are warmer.
"""

import asyncio
import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.request_cost import SHAPES, cpu_ns, read_answer
from benchmarks.servers import GATEWAY, MODEL, Server, paced, slicewise

# How long the engine takes for a first token, and when in it the gateway's time is read: rendering
# 64 requests takes it some 100 ms.
_TTFT_S, _READ_AFTER_S = 0.6, 0.45
AT_ONCE = (1, 8, 32, 64)
_WARM_UP_ROUNDS, NUM_ROUNDS = 6, 40


@dataclass(frozen=True, slots=True)
class Start:
    """CPU microseconds of one request before its first token; median and quartiles of rounds."""

    at_once: int
    median_us: float
    low_us: float
    high_us: float


class _Rounds:
    """Rounds of requests to a server, and the time of its gateway."""

    def __init__(self, server: Server) -> None:
        url = urlsplit(server.url)
        self._host, self._port = url.hostname or "127.0.0.1", url.port or 80
        (gateway,) = server.processes()[GATEWAY]
        self._pid = gateway.pid
        self._shape = dataclasses.replace(SHAPES[0], body=SHAPES[0].body | {"model": MODEL})

    async def round(self, at_once: int) -> float:
        """Returns the CPU microseconds of each of so many requests."""
        # New ones: HAProxy, which alone sees them, may replace itself and close others.
        connections = [
            await asyncio.open_connection(self._host, self._port) for _ in range(at_once)
        ]
        before = cpu_ns(self._pid)
        await asyncio.sleep(_READ_AFTER_S)
        idle = cpu_ns(self._pid) - before
        begun = cpu_ns(self._pid)
        for number, (_, writer) in enumerate(connections):
            writer.write(self._shape.request(number))
        await asyncio.sleep(_READ_AFTER_S)
        spent = cpu_ns(self._pid) - begun
        await asyncio.gather(*(read_answer(reader) for reader, _ in connections))
        for _, writer in connections:
            writer.close()
        return (spent - idle) / (1000 * at_once)


async def _measured(server: Server, num_rounds: int) -> list[Start]:
    rounds = _Rounds(server)
    starts = []
    for at_once in AT_ONCE:
        for _ in range(_WARM_UP_ROUNDS):
            await rounds.round(at_once)
        spent = [await rounds.round(at_once) for _ in range(num_rounds)]
        low, median, high = statistics.quantiles(spent, n=4)
        starts.append(Start(at_once, median, low, high))
    return starts


def run(num_rounds: int = NUM_ROUNDS) -> list[Start]:
    """Measures so many rounds of each size, two at least."""
    with slicewise(paced(_TTFT_S * 1000, 20.0)) as server:
        return asyncio.run(_measured(server, num_rounds))


def report(starts: list[Start]) -> Iterator[str]:
    """Yields the lines of a markdown table."""
    yield "| at once | CPU of the gateway before the first token, us a request | quartiles |"
    yield "|---|---|---|"
    for start in starts:
        yield (
            f"| {start.at_once} | {start.median_us:.0f} "
            f"| {start.low_us:.0f} to {start.high_us:.0f} |"
        )
