"""Which value of its knob a policy takes part with besides the shipped one. Pure.

What ships is made for services in general: a share of a slice's limit that suits one keeps half of
another's requests late. A user would try a few values. So of each policy that value is chosen which
costs least of those that keep `LEVEL` on average over the days of the choice, all of the tuning
set; where none keeps it, the one that keeps most.
"""

from autoscaling.simulator.policies import POLICIES
from benchmarks.policies.cases import TUNING
from benchmarks.policies.figures import CurvePoint, Table, points_of
from benchmarks.policies.jobs import CHOICE_SEEDS

LEVEL = 0.99


def tried(table: Table, policy: str) -> tuple[CurvePoint, ...]:
    """Returns the values of a policy's knob that were run on every day of the choice."""
    return points_of(table, policy, [(case, seed) for case in TUNING for seed in CHOICE_SEEDS])


def chosen_of(table: Table, policy: str) -> CurvePoint | None:
    """Returns the value that is chosen; `None` as long as not all of the knob's were run."""
    values = tried(table, policy)
    if len(values) < len(POLICIES[policy].knob.values):
        return None
    keeping = [each for each in values if each.slo_ratio >= LEVEL]
    if keeping:
        return min(keeping, key=lambda each: each.cost_usd)
    return max(values, key=lambda each: each.slo_ratio)
