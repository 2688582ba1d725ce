"""Computes the slices that a load needs to meet the objectives, before asking what exists.

Pure: no clock, no I/O, no chance. What one slice can carry comes from `serving.domain.capacity`.
"""

import math
from dataclasses import dataclass

from autoscaling.policy.rules import Rules
from serving.domain.capacity.slice_profile import CapacityProfile


@dataclass(frozen=True, slots=True)
class DemandInputs:
    """The requests per second, and the average uncached prompt tokens and output tokens of each."""

    requests_per_s: float
    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The slices that a load takes.

    `mean` carries its mean, `spread` carries random variation, `backlog` works off what waits
    already. `pressure` is for objectives that are missed and caches that are full, and as far as
    there is a backlog it is for the same.
    """

    mean: float
    spread: float = 0.0
    backlog: float = 0.0
    pressure: float = 0.0

    @property
    def slices(self) -> float:
        """The number of slices needed, as a fraction."""
        return self.mean + self.spread + max(self.backlog, self.pressure)

    @property
    def arithmetic(self) -> str:
        """The sum behind the number, for a log line."""
        text = (
            f"{self.slices:.2f} slices = {self.mean:.2f} mean + {self.spread:.2f} spread"
            f" + {self.backlog:.2f} backlog"
        )
        more = self.pressure - self.backlog
        return f"{text} + {more:.2f} pressure" if more > 0 else text


class UnreachableObjectiveError(ValueError):
    """Reports that no number of slices meets the objective: even an idle slice is slower.

    Give up, or relax the objective.
    """


def demand_of(
    traffic: DemandInputs, profile: CapacityProfile, rules: Rules, factor: float = 1.0
) -> Demand:
    """The slices that steady `traffic` takes, where one carries `factor` times what the law says.

    The spread is `rules.spread` standard deviations of the requests in flight. Their number is
    Poisson at best, so it matters for few slices and vanishes for many.

    Raises:
        UnreachableObjectiveError: an idle slice already takes longer than the TPOT objective for a
        step.
    """
    if traffic.requests_per_s <= 0:
        return Demand(0.0)
    tpot_s = rules.planned_tpot_s
    at_most = profile.max_requests_per_s(traffic.input_tokens, traffic.output_tokens, tpot_s)
    if at_most <= 0:
        raise UnreachableObjectiveError(
            f"tpot_s is {rules.objectives.tpot_s:g}, of which {rules.tpot_margin:g} are planned"
            f" for; a step of an idle slice takes {profile.base_s:g} s ({profile.source})"
        )
    mean = traffic.requests_per_s / (factor * at_most)
    in_flight = traffic.requests_per_s * max(traffic.output_tokens * tpot_s, profile.base_s)
    return Demand(mean, spread=rules.spread * mean / math.sqrt(max(in_flight, 1.0)))


def num_at_once(
    traffic: DemandInputs, profile: CapacityProfile, rules: Rules, factor: float = 1.0
) -> float:
    """Returns how many requests one slice runs at once at the objective, with none waiting."""
    tpot_s = rules.objectives.tpot_s
    at_most = profile.max_requests_per_s(traffic.input_tokens, traffic.output_tokens, tpot_s)
    return min(profile.max_num_seqs, factor * at_most * traffic.output_tokens * tpot_s)


def backlog_demand(
    num_waiting: float,
    traffic: DemandInputs,
    profile: CapacityProfile,
    rules: Rules,
    factor: float = 1.0,
) -> float:
    """Returns the extra slices that work off `num_waiting` requests within the TTFT objective.

    It is that of a prompt of average length; what a prefix cache saves shortens it.
    """
    if num_waiting <= 0:
        return 0.0
    rate = num_waiting / rules.objectives.ttft_of(traffic.input_tokens)
    waiting = DemandInputs(rate, max(traffic.input_tokens, 1.0), max(traffic.output_tokens, 1.0))
    return demand_of(waiting, profile, rules, factor).mean
