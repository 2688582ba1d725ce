"""Figures over records: means over seeds with intervals, pairs, and cost at equal service. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from autoscaling.simulator.comparison import SeedSpread
from autoscaling.simulator.policies import POLICIES, SLICEWISE
from benchmarks.policies.jobs import LOWER_BOUND, Job
from benchmarks.policies.records import PolicyRecord
from benchmarks.policies.worlds import AS_BELIEVED

# A share that nobody misses has no logarithm.
_LEAST_MISS = 1e-6


class Table:
    """The records by what they are of."""

    def __init__(self, records: Iterable[PolicyRecord]) -> None:
        self._by_job = {each.job: each for each in records}

    def find(self, job: Job) -> PolicyRecord | None:
        """Returns the record of a job; `None` if it was not run."""
        return self._by_job.get(job)

    def seeds(
        self, case: str, policy: str, world: str = AS_BELIEVED, *, value: float | None = None
    ) -> dict[int, PolicyRecord]:
        """Returns a policy's records with its knob at `value`, by seed in ascending order."""
        wanted = (case, world, policy, value)
        found = [
            each
            for each in self._by_job.values()
            if (each.case, each.world, each.policy, each.value) == wanted
        ]
        return {each.seed: each for each in sorted(found, key=lambda each: each.seed)}

    def ratios(
        self, case: str, policy: str, to: str, *, value: float | None = None
    ) -> SeedSpread | None:
        """The cost as a multiple of another's, pair by pair of equal seeds; `None` without any.

        `value` is that of the first one's knob; the other one is as shipped.
        """
        ours, theirs = self.seeds(case, policy, value=value), self.seeds(case, to)
        pairs = [
            each.cost_usd / other.cost_usd
            for seed, each in ours.items()
            if (other := theirs.get(seed)) is not None and each.cost_usd and other.cost_usd
        ]
        return SeedSpread.of(pairs) if pairs else None

    def over_bound(
        self, case: str, policy: str, *, value: float | None = None
    ) -> SeedSpread | None:
        """The cost as a multiple of the lower bound."""
        return self.ratios(case, policy, LOWER_BOUND, value=value)

    def spread(
        self,
        case: str,
        policy: str,
        figure: Callable[[PolicyRecord], float | None],
        *,
        value: float | None = None,
    ) -> SeedSpread | None:
        """The spread of a figure over the seeds; `None` if a seed has none."""
        values = [figure(each) for each in self.seeds(case, policy, value=value).values()]
        known = [value for value in values if value is not None]
        return SeedSpread.of(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What batches of one window did, in pairs with the same seeds without them, on average.

    `added` is the cost that they added as a share of what their tokens cost on spot, `slo_change`
    what the share of requests within their objectives changed by, `in_time` the share of lines.
    """

    num_seeds: int
    added: float
    slo_change: float
    in_time: float


def batch_figures(table: Table, case: str, world: str) -> BatchFigures | None:
    """The figures of batches in a case; `None` where there is no pair."""
    alone, beside = table.seeds(case, SLICEWISE), table.seeds(case, SLICEWISE, world)
    added, change, in_time = [], [], []
    for seed in alone.keys() & beside.keys():
        one, other = alone[seed], beside[seed]
        if not (one.cost_usd and other.cost_usd and other.lines_spot_usd and other.num_lines):
            continue
        added.append((other.cost_usd - one.cost_usd) / other.lines_spot_usd)
        change.append((other.slo_ratio or 0.0) - (one.slo_ratio or 0.0))
        in_time.append((other.num_lines_in_time or 0) / other.num_lines)
    if not added:
        return None
    return BatchFigures(len(added), fmean(added), fmean(change), fmean(in_time))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The result of a policy with its knob at `value`, of a day on average."""

    value: float
    cost_usd: float
    slo_ratio: float


def curve(table: Table, case: str, policy: str, seeds: Iterable[int]) -> tuple[CurvePoint, ...]:
    """The points of a policy over its knob on these days of a case; see `points_of`."""
    return points_of(table, policy, [(case, seed) for seed in seeds])


def points_of(table: Table, policy: str, days: Sequence[tuple[str, int]]) -> tuple[CurvePoint, ...]:
    """The points of a policy over its knob, in the order of the knob. `days` are cases and seeds.

    Those that were run on all days: each is of their mean cost and service.
    """
    knob, points = POLICIES[policy].knob, []
    for value in knob.values:
        records = [
            table.find(Job(case, AS_BELIEVED, policy, knob.shown(value), seed))
            for case, seed in days
        ]
        costs = [each.cost_usd for each in records if each and each.cost_usd is not None]
        ratios = [each.slo_ratio for each in records if each and each.slo_ratio is not None]
        if len(costs) == len(ratios) == len(days):
            points.append(CurvePoint(value, fmean(costs), fmean(ratios)))
    return tuple(points)


def cost_at(points: Sequence[CurvePoint], slo_ratio: float) -> float | None:
    """The least cost at which a policy keeps this share within the objectives.

    Between two neighbours of the curve the cost is a straight line over the logarithm of the share
    that misses: by the share itself, points that lie far apart would cost too much between them.
    `None` where no point keeps it.
    """
    costs = [each.cost_usd for each in points if each.slo_ratio >= slo_ratio]
    for low, high in _around(points, slo_ratio):
        least, most, wanted = (
            math.log(max(1 - each, _LEAST_MISS))
            for each in (high.slo_ratio, low.slo_ratio, slo_ratio)
        )
        share = (most - wanted) / (most - least)
        costs.append(low.cost_usd + share * (high.cost_usd - low.cost_usd))
    return min(costs, default=None)


def is_between(points: Sequence[CurvePoint], slo_ratio: float) -> bool:
    """Returns whether the curve goes through this level, and does not only begin above it."""
    return any(True for _ in _around(points, slo_ratio))


def _around(
    points: Sequence[CurvePoint], slo_ratio: float
) -> Iterator[tuple[CurvePoint, CurvePoint]]:
    for one, other in pairwise(points):
        low, high = sorted((one, other), key=lambda each: each.slo_ratio)
        if low.slo_ratio < slo_ratio <= high.slo_ratio:
            yield low, high
