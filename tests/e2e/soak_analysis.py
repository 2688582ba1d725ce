"""What a soak shows: whether memory grows with the requests, and whether latencies drift. Pure.

A process that keeps something of every request grows by it without end; allocators, caches and
pools grow too, but ever less. So growth is the slope over the second half of the run, per request,
with the interval that its samples leave it, and not the difference of two of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from scipy import stats

from loadtest.scorecard.compare import Comparison, Difference, NamedRun, compare
from loadtest.scorecard.slo import ServiceLevel
from loadtest.scorecard.stored_run import StoredRun

KIB, MIB = 1024, 1024 * 1024
# Neighbouring samples of one process are nearly equal, so that each counts as evidence only once
# within so many stretches of time.
NUM_STRETCHES = 10
_CONFIDENCE = 0.95
# Percentiles with enough requests beyond them in a third of any soak.
_JUDGED = ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "E2E p50", "E2E p95")


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of one process at one instant."""

    at_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one process over a soak: at its middle, at its end, and the slope between.

    `slope`, `low` and `high` are bytes per request, the latter two its 95 % interval.
    """

    middle_bytes: int
    end_bytes: int
    slope: float
    low: float
    high: float

    def is_shown_above(self, bytes_per_request: float) -> bool:
        """Whether the samples leave no doubt that it grows by more."""
        return self.low > bytes_per_request

    def is_shown_within(self, bytes_per_request: float) -> bool:
        """Whether they leave no doubt that it does not."""
        return self.high <= bytes_per_request


def growth(samples: Sequence[Sample], requests_per_s: float) -> Growth:
    """Of one process, over the second half of the time that the samples cover.

    Raises:
        ValueError: there are too few of them to fill the stretches.
    """
    middle_s = (samples[0].at_s + samples[-1].at_s) / 2
    late = [each for each in samples if each.at_s >= middle_s]
    if len(late) < 2 * NUM_STRETCHES:
        raise ValueError(f"{len(late)} samples in the second half; at least {2 * NUM_STRETCHES}")
    stretches = np.array_split(
        np.array([(each.at_s, each.num_bytes) for each in late]), NUM_STRETCHES
    )
    at_s, num_bytes = np.array([stretch.mean(axis=0) for stretch in stretches]).T
    line = stats.linregress(at_s, num_bytes)
    margin = float(stats.t.ppf((1 + _CONFIDENCE) / 2, NUM_STRETCHES - 2) * line.stderr)
    slope = float(line.slope)
    return Growth(
        late[0].num_bytes,
        late[-1].num_bytes,
        slope / requests_per_s,
        (slope - margin) / requests_per_s,
        (slope + margin) / requests_per_s,
    )


def compare_thirds(run: StoredRun, seed: int) -> Comparison:
    """The last third of the steady window against the first."""
    from_s, until_s = run.window_s
    third_s = (until_s - from_s) / 3
    return compare(
        NamedRun("first third", part(run, from_s, from_s + third_s)),
        NamedRun("last third", part(run, until_s - third_s, until_s)),
        ServiceLevel(),
        seed,
    )


def part(run: StoredRun, from_s: float, until_s: float) -> StoredRun:
    """The run as if its schedule had ended at `until_s` and its warm-up at `from_s`."""
    requests = tuple(each for each in run.requests if each.scheduled_s < until_s)
    start = msgspec.structs.replace(
        run.start, warmup_s=from_s, duration_s=until_s, num_scheduled=len(requests)
    )
    client = tuple(each for each in run.client if from_s <= each.at_s <= until_s)
    return replace(run, start=start, requests=requests, client=client)


def drifts(comparison: Comparison, ratio: float) -> list[Difference]:
    """The latencies that are, beyond their intervals, worse by more than `ratio` of what they were.

    The interval leaves out what the machine does to a whole stretch of time, hence the ratio.
    """
    return [
        each
        for each in comparison.differences
        if each.metric in _JUDGED
        and each.a is not None
        and each.low is not None
        and each.low > ratio * each.a
    ]
