"""Which value of its knob a policy takes part with besides the shipped one. Pure.

What ships is made for services in general: a share of a slice's limit that suits one keeps half of
another's requests late. A user would try a few values. So of each policy that value is chosen which
costs least of those that keep `LEVEL` on average over the days of the choice, all of the tuning
set; where none keeps it, the one that keeps most.
"""

from dataclasses import dataclass
from math import fsum
from statistics import fmean

from autoscaling.simulator.policies import POLICIES
from benchmarks.policies.cases import TUNING
from benchmarks.policies.figures import Table
from benchmarks.policies.jobs import CHOICE_SEEDS, Job
from benchmarks.policies.worlds import AS_BELIEVED

LEVEL = 0.99


@dataclass(frozen=True, slots=True)
class Tried:
    """What a value of a policy's knob came to on all days of the choice: sum of costs, mean SLO."""

    value: float
    cost_usd: float
    slo_ratio: float


def tried(table: Table, policy: str) -> tuple[Tried, ...]:
    """Returns the values of a policy's knob that were run on every day of the choice."""
    knob, found = POLICIES[policy].knob, []
    days = [(case, seed) for case in TUNING for seed in CHOICE_SEEDS]
    for value in knob.values:
        records = [
            table.find(Job(case, AS_BELIEVED, policy, knob.shown(value), seed))
            for case, seed in days
        ]
        costs = [each.cost_usd for each in records if each and each.cost_usd is not None]
        ratios = [each.slo_ratio for each in records if each and each.slo_ratio is not None]
        if len(costs) == len(ratios) == len(days):
            found.append(Tried(value, fsum(costs), fmean(ratios)))
    return tuple(found)


def chosen_of(table: Table, policy: str) -> Tried | None:
    """Returns the value that is chosen; `None` as long as not all of the knob's were run."""
    values = tried(table, policy)
    if len(values) < len(POLICIES[policy].knob.values):
        return None
    keeping = [each for each in values if each.slo_ratio >= LEVEL]
    if keeping:
        return min(keeping, key=lambda each: each.cost_usd)
    return max(values, key=lambda each: each.slo_ratio)
