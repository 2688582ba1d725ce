"""Lays out a run along its time axis, in equal intervals. Pure.

Latencies stand in the interval their requests were due in, failures in the one they ended in.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.records import RequestRecord
from loadtest.scorecard.latency import Latency, tpot_s, ttft_scheduled_s
from loadtest.scorecard.spread import Spread, spread_of
from loadtest.scorecard.stored_run import StoredRun
from loadtest.scorecard.token_flow import TokenFlow

# Finer than a second, a percentile has too few requests; more than these, a plot too many points.
MIN_INTERVAL_S = 1.0
MAX_INTERVALS = 120


@dataclass(frozen=True, slots=True)
class Timeline:
    """The values per interval; interval `i` goes from `edges_s[i]` to `edges_s[i + 1]`.

    `asked_per_s` is what the schedule has (of what is known to have been due), `achieved_per_s`
    what was sent. `in_flight` is at the end of the interval. `errors` counts failures by kind.
    """

    edges_s: tuple[float, ...]
    ttft_scheduled_s: tuple[Spread, ...]
    tpot_s: tuple[Spread, ...]
    asked_per_s: tuple[float, ...]
    achieved_per_s: tuple[float, ...]
    output_tokens_per_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    errors: dict[str, tuple[int, ...]]

    @property
    def middles_s(self) -> tuple[float, ...]:
        """The middle of each interval."""
        pairs = zip(self.edges_s, self.edges_s[1:], strict=False)
        return tuple((start_s + end_s) / 2 for start_s, end_s in pairs)


def timeline_of(run: StoredRun) -> Timeline:
    """The whole run, warm-up and drain included."""
    until_s = max(run.ended_s, MIN_INTERVAL_S)
    num = max(1, min(MAX_INTERVALS, int(until_s / MIN_INTERVAL_S)))
    width_s = until_s / num
    edges_s = (*(width_s * index for index in range(num)), until_s)
    flow = TokenFlow(run.requests)
    received = [flow.received_by(edge_s) for edge_s in edges_s]
    sent_s = sorted(request.sent_s for request in run.requests)
    ended_s = sorted(request.ended_s for request in run.requests)
    return Timeline(
        edges_s,
        _spreads(run.requests, ttft_scheduled_s, width_s, num),
        _spreads(run.requests, tpot_s, width_s, num),
        _rates([request.scheduled_s for request in run.requests], width_s, num),
        _rates(sent_s, width_s, num),
        tuple((received[index + 1] - received[index]) / width_s for index in range(num)),
        tuple(
            bisect.bisect_right(sent_s, edge_s) - bisect.bisect_right(ended_s, edge_s)
            for edge_s in edges_s[1:]
        ),
        _errors(run.requests, width_s, num),
    )


def _index(at_s: float, width_s: float, num: int) -> int:
    return min(max(int(at_s / width_s), 0), num - 1)


def _spreads(
    requests: Sequence[RequestRecord], latency: Latency, width_s: float, num: int
) -> tuple[Spread, ...]:
    values: list[list[float | None]] = [[] for _ in range(num)]
    for request in requests:
        values[_index(request.scheduled_s, width_s, num)].append(latency(request))
    return tuple(spread_of(value) for value in values)


def _rates(instants_s: Sequence[float], width_s: float, num: int) -> tuple[float, ...]:
    counts = Counter(_index(at_s, width_s, num) for at_s in instants_s)
    return tuple(counts[index] / width_s for index in range(num))


def _errors(
    requests: Sequence[RequestRecord], width_s: float, num: int
) -> dict[str, tuple[int, ...]]:
    counts: dict[str, Counter[int]] = {}
    for request in requests:
        if request.error is not None:
            at = _index(request.ended_s, width_s, num)
            counts.setdefault(request.error, Counter())[at] += 1
    return {kind: tuple(counts[kind][index] for index in range(num)) for kind in sorted(counts)}
