"""Runs a job: a policy, the lower bound or the plan with hindsight in one world of one case."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from autoscaling.simulator.bounds.yardsticks import lower_bound_of
from autoscaling.simulator.comparison import yardsticks_of
from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.policies import make_policy
from autoscaling.simulator.run import simulate
from benchmarks.policies.batches import cost_on_spot
from benchmarks.policies.cases import prepared_case
from benchmarks.policies.jobs import HINDSIGHT, LOADING_BOUND, LOWER_BOUND, SAFE_HINDSIGHT, Job
from benchmarks.policies.records import PolicyRecord
from benchmarks.policies.worlds import Situation, situation

_HOUR_S = 3600.0


class Runner:
    """Keeps the last case that was prepared: several jobs in a row are of one.

    `source` is the fingerprint of the code by the name of a policy.
    """

    def __init__(self, traces: Path | None, commit: str, source: Callable[[str], str]) -> None:
        self._traces, self._commit, self._source = traces, commit, source
        self._kept: tuple[tuple[str, str, int], Situation] | None = None

    def run(self, job: Job) -> PolicyRecord:
        """The record of a job.

        Raises:
            ValueError: the case is recorded, and there are no traces.
        """
        where = self._situation(job)
        began_s = time.perf_counter()
        if job.policy in (LOWER_BOUND, LOADING_BOUND):
            least_usd = lower_bound_of(where.run, is_loading=job.policy == LOADING_BOUND)
            return self._record(job, least_usd, began_s)
        if job.policy in (HINDSIGHT, SAFE_HINDSIGHT):
            floor_ratio = where.run.rules.floor_ratio if job.policy == SAFE_HINDSIGHT else 0.0
            known = yardsticks_of(where.run, floor_ratio=floor_ratio)
            return self._record(job, known.cost_usd, began_s, slo_ratio=known.slo_ratio)
        policy = make_policy(where.believed, job.policy, job.value)
        outcome = simulate(where.setup, policy)
        service = outcome.service
        return self._record(
            job,
            outcome.cost.total_usd,
            began_s,
            slo_ratio=service.slo_ratio,
            later_slo_ratio=slo_after(outcome, _HOUR_S),
            served_ratio=service.served_ratio,
            mean_slices=outcome.mean_slices,
            num_requests=service.num_requests,
            ttft_p99_s=_finite(service.ttft_s[99]),
            tpot_p99_s=_finite(service.tpot_s[99]),
            **_of_batches(where, outcome),
        )

    def _situation(self, job: Job) -> Situation:
        key = (job.case, job.world, job.seed)
        if self._kept is None or self._kept[0] != key:
            # The old one goes first: a day has millions of requests.
            self._kept = None
            run = prepared_case(job.case, job.seed, self._traces)
            self._kept = (key, situation(run, job.world))
        return self._kept[1]

    def _record(
        self, job: Job, cost_usd: float | None, began_s: float, **figures: float | None
    ) -> PolicyRecord:
        wall_s = round(time.perf_counter() - began_s, 1)
        return PolicyRecord(
            *job,
            commit=self._commit,
            cost_usd=cost_usd,
            wall_s=wall_s,
            source=self._source(job.policy),
            **figures,  # type: ignore[arg-type]  # counts are whole
        )


def _of_batches(where: Situation, outcome: SimulationOutcome) -> dict[str, float]:
    if not where.setup.batches:
        return {}
    return {
        "num_lines": outcome.batches.num_lines,
        "num_lines_in_time": outcome.batches.num_in_time,
        "lines_spot_usd": cost_on_spot(where.run, where.setup.batches),
    }


def slo_after(outcome: SimulationOutcome, from_s: float) -> float | None:
    """Returns the share within both objectives of what arrives from `from_s` on.

    It is `None` if nothing does.
    """
    by_interval = outcome.service_timeline(from_s)
    # The last interval is shorter where the day is no multiple; the rates are weighted with it.
    ends_s = [*by_interval.at_s[1:].tolist(), outcome.timeline.end_s]
    spans_s = [end_s - at_s for end_s, at_s in zip(ends_s, by_interval.at_s.tolist(), strict=True)]
    arrived = sum(
        rate * span for rate, span in zip(by_interval.arrivals_per_s[1:], spans_s[1:], strict=True)
    )
    good = sum(
        rate * span for rate, span in zip(by_interval.goodput_per_s[1:], spans_s[1:], strict=True)
    )
    return float(good / arrived) if arrived else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
