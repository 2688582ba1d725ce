"""One load on one server as figures: what arrived, and who used the CPU meanwhile."""

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from benchmarks.servers import Server
from benchmarks.side_by_side.client import Seen, run_load
from benchmarks.side_by_side.loads import Load

CLIENT = "client"


class Reading(msgspec.Struct, frozen=True):
    """One load. Latencies are p50 and p99, `None` where there were none.

    `cpu_s` are CPU seconds in the window by kind of process, the client's under `client`;
    `other_cores` are cores that processes which are no part of it used meanwhile. The others are
    as in `client.Seen`.
    """

    load: str
    window_s: float
    num_answers: int
    num_tokens: float
    num_events: int
    ttft_ms: tuple[float, float] | None
    gap_ms: tuple[float, float] | None
    cpu_s: dict[str, float]
    other_cores: float
    errors: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the window."""
        return self.num_tokens / self.window_s

    @property
    def tokens_per_event(self) -> float | None:
        """How many tokens an event carries on average; `None` where none came."""
        return self.num_tokens / self.num_events if self.num_events else None

    def cpu_us_per_token(self, *kinds: str) -> float | None:
        """CPU microseconds per token of these kinds together; `None` where no token came."""
        return self.cpu_s_of(*kinds) / self.num_tokens * 1e6 if self.num_tokens else None

    def cpu_s_of(self, *kinds: str) -> float:
        """CPU seconds of these kinds together."""
        return sum(self.cpu_s.get(kind, 0.0) for kind in kinds)


class Usage(msgspec.Struct, frozen=True):
    """CPU seconds so far: by kind and process, and of the whole machine."""

    by_kind: dict[str, dict[int, float]]
    machine_s: float


async def measure(server: Server, load: Load, seed: str) -> Reading:
    """Puts a server under a load; raises as `run_load`."""
    processes = server.processes()
    edges: list[Usage] = []
    seen = await run_load(server.url, load, seed, lambda: edges.append(_usage(processes)))
    return reading_of(load, seen, *edges)


def reading_of(load: Load, seen: Seen, before: Usage, after: Usage) -> Reading:
    """Returns the figures of what was seen between two readings of CPU time."""
    # What a process that ended meanwhile used is counted as others'.
    used_s = {
        kind: sum(total_s - before.by_kind[kind][pid] for pid, total_s in members.items())
        for kind, members in after.by_kind.items()
    }
    others_s = after.machine_s - before.machine_s - sum(used_s.values())
    return Reading(
        load=load.name,
        window_s=seen.window_s,
        num_answers=seen.num_answers,
        num_tokens=seen.num_tokens,
        num_events=seen.num_events,
        ttft_ms=_p50_p99_ms(seen.ttft_s, 0),
        gap_ms=_p50_p99_ms(seen.gaps_s, seen.num_same_read),
        cpu_s=used_s,
        other_cores=others_s / seen.window_s,
        errors=dict(seen.errors),
    )


def _p50_p99_ms(values_s: Sequence[float], num_zeros: int) -> tuple[float, float] | None:
    values = sorted([0.0] * num_zeros + list(values_s))
    if len(values) < 2:
        return (values[0] * 1e3, values[0] * 1e3) if values else None
    points = statistics.quantiles(values, n=100, method="inclusive")
    return points[49] * 1e3, points[98] * 1e3


def _usage(processes: Mapping[str, Sequence[psutil.Process]]) -> Usage:
    machine = psutil.cpu_times()
    busy_s = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    by_kind: dict[str, dict[int, float]] = {CLIENT: {0: time.process_time()}}
    for kind, members in processes.items():
        by_kind[kind] = {}
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                by_kind[kind][process.pid] = sum(process.cpu_times()[:2])
    return Usage(by_kind, busy_s)
