"""Summarises a simulated day: how many requests were served and how well, the cost, the course.

Owns the sums over requests, lives of slices and ticks. Does not own their display. Pure.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autoscaling.records import Decision, ModelLoad, Plan, SliceView
from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.batch_lane import BatchService
from autoscaling.simulator.world.engines import Answers, SimulatedTraffic
from autoscaling.simulator.world.slices import ClassSetup, SliceRun
from serving.domain.capacity.objectives import Objectives
from serving.domain.slice_lifecycle import HELD_STATES, SliceState

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Service:
    """The service that the requests got. Ratios are of all that arrived; 1 if none did.

    `slo_ratio` counts those that were served whole and met both objectives. Percentiles (by their
    number) are of the served; TPOT of those with two tokens or more. `num_moves` counts how often a
    request had to leave an engine; `stall_s` is the longest time that a stream stood still.
    """

    num_requests: int
    num_served: int
    num_failed: int
    num_refused: int
    served_ratio: float
    slo_ratio: float
    ttft_s: Mapping[int, float]
    tpot_s: Mapping[int, float]
    num_moves: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """The cost of the slices; `committed_usd`, a part of `total_usd`, was due used or not."""

    total_usd: float
    committed_usd: float
    usd_by_class: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """The decision of a plan and the tick it fell in."""

    at_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class FleetTimeline:
    """The course of the fleet, one value per tick.

    `slices` is keyed by compute class and state, with states that occur only. `requests_per_s` is
    what was reported to the policy, NaN where nothing was; `demand_slices` is NaN where the policy
    named none. `usd_per_hour` is of slices that are held, and of all that is prepaid.
    """

    at_s: kernel.F64
    requests_per_s: kernel.F64
    num_waiting: kernel.I32
    num_in_flight: kernel.I32
    num_ready: kernel.I32
    num_held: kernel.I32
    demand_slices: kernel.F64
    usd_per_hour: kernel.F64
    slices: Mapping[tuple[str, SliceState], kernel.I32]
    decisions: tuple[TimedDecision, ...]
    refusals: tuple[TimedDecision, ...]
    end_s: float


@dataclass(frozen=True, slots=True)
class ServiceTimeline:
    """The service of requests by arrival, in intervals from `at_s`; NaN where none was served.

    `goodput_per_s` are those that met all objectives.
    """

    at_s: kernel.F64
    arrivals_per_s: kernel.F64
    goodput_per_s: kernel.F64
    ttft_p50_s: kernel.F64
    ttft_p99_s: kernel.F64


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """The outcome of one day under one policy. `seconds` are by compute class and slice state.

    `mean_slices` and `peak_slices` count slices that are held; the peak is that observed at ticks.
    """

    policy: str
    objectives: Objectives
    service: Service
    cost: SimulatedCost
    mean_slices: float
    peak_slices: int
    seconds: Mapping[tuple[str, SliceState], float]
    lives: tuple[SliceRun, ...]
    timeline: FleetTimeline
    batches: BatchService
    requests: Requests = field(repr=False)
    answers: Answers = field(repr=False)

    def service_timeline(self, interval_s: float) -> ServiceTimeline:
        """Returns the service of requests by when they arrived."""
        starts_s = np.arange(0.0, self.timeline.end_s, interval_s, dtype=np.float64)
        bounds = np.searchsorted(self.requests.arrival_s, [*starts_s, np.inf])
        is_good = _met(self.requests, self.answers, self.objectives)
        good = np.concatenate([[0], np.cumsum(is_good)])[bounds]
        p50_s, p99_s = np.full(len(starts_s), np.nan), np.full(len(starts_s), np.nan)
        for place, (first, end) in enumerate(pairwise(bounds.tolist())):
            is_served = self.answers.status[first:end] == kernel.SERVED
            if is_served.any():
                ttft_s = self.answers.first_s[first:end][is_served]
                p50_s[place], p99_s[place] = np.percentile(ttft_s, [50, 99])
        spans_s = np.minimum(interval_s, self.timeline.end_s - starts_s)
        return ServiceTimeline(
            at_s=starts_s,
            arrivals_per_s=np.diff(bounds) / spans_s,
            goodput_per_s=np.diff(good) / spans_s,
            ttft_p50_s=p50_s,
            ttft_p99_s=p99_s,
        )


class TimelineRecorder:
    """Records the fleet at every tick."""

    def __init__(self, classes: Sequence[ClassSetup]) -> None:
        self._terms = {each.terms.name: each.terms for each in classes}
        self._traffic: list[SimulatedTraffic] = []
        self._rates_per_s: list[float] = []
        self._demands: list[float] = []
        self._counts: list[Counter[tuple[str, SliceState]]] = []
        self._decisions: list[TimedDecision] = []
        self._refusals: list[TimedDecision] = []
        self._refused: tuple[Decision, ...] = ()

    def note(
        self,
        traffic: SimulatedTraffic,
        load: ModelLoad | None,
        views: Sequence[SliceView],
        plan: Plan,
    ) -> None:
        """Records the state before the plan, and the plan; a repeated refusal counts once."""
        self._traffic.append(traffic)
        self._rates_per_s.append(np.nan if load is None else load.requests_per_s)
        self._demands.append(np.nan if plan.demand_slices is None else plan.demand_slices)
        self._counts.append(Counter((view.compute_class, view.state) for view in views))
        self._decisions += [TimedDecision(plan.at_s, each) for each in plan.decisions]
        if plan.refusals != self._refused:
            self._refused = plan.refusals
            self._refusals += [TimedDecision(plan.at_s, each) for each in plan.refusals]

    def close(self, end_s: float) -> FleetTimeline:
        """Returns the records as arrays; `end_s` is when the last tick ends."""
        keys = sorted(set().union(*self._counts))
        slices = {key: np.array([counts[key] for counts in self._counts], np.int32) for key in keys}
        nobody = np.zeros(len(self._traffic), np.int32)
        held = {key: counts for key, counts in slices.items() if key[1] in HELD_STATES}
        ready = [counts for key, counts in held.items() if key[1] == SliceState.READY]
        usd_per_hour = np.zeros(len(self._traffic))
        for name, terms in self._terms.items():
            of_class = sum((c for key, c in held.items() if key[0] == name), nobody)
            paid = np.full_like(nobody, terms.max_slices) if terms.is_prepaid else of_class
            usd_per_hour += paid * terms.price
        return FleetTimeline(
            at_s=np.array([each.at_s for each in self._traffic]),
            requests_per_s=np.array(self._rates_per_s),
            num_waiting=np.array([each.num_waiting for each in self._traffic], np.int32),
            num_in_flight=np.array([each.num_in_flight for each in self._traffic], np.int32),
            num_ready=sum(ready, nobody),
            num_held=sum(held.values(), nobody),
            demand_slices=np.array(self._demands),
            usd_per_hour=usd_per_hour,
            slices=slices,
            decisions=tuple(self._decisions),
            refusals=tuple(self._refusals),
            end_s=end_s,
        )


def sum_up(
    policy: str,
    requests: Requests,
    answers: Answers,
    lives: Sequence[SliceRun],
    seconds: Mapping[tuple[str, SliceState], float],
    timeline: FleetTimeline,
    classes: Sequence[ClassSetup],
    objectives: Objectives,
    batches: BatchService,
) -> SimulationOutcome:
    """Sums up a simulated day."""
    held_s = sum(spent_s for (_, state), spent_s in seconds.items() if state in HELD_STATES)
    return SimulationOutcome(
        policy=policy,
        objectives=objectives,
        service=_service(requests, answers, objectives),
        cost=_cost(seconds, classes, timeline.end_s),
        mean_slices=held_s / timeline.end_s,
        peak_slices=int(timeline.num_held.max()),
        seconds=dict(seconds),
        lives=tuple(lives),
        timeline=timeline,
        batches=batches,
        requests=requests,
        answers=answers,
    )


def tpot_s(requests: Requests, answers: Answers) -> kernel.F32:
    """Returns each request's mean time per later token; NaN for one token or without an end."""
    gaps = np.where(requests.output_tokens > 1, requests.output_tokens - 1, np.nan)
    return np.asarray((answers.last_s - answers.first_s) / gaps, np.float32)


def _met(requests: Requests, answers: Answers, objectives: Objectives) -> npt.NDArray[np.bool_]:
    per_token_s = tpot_s(requests, answers)
    is_paced = np.isnan(per_token_s) | (per_token_s <= objectives.tpot_s)
    prompts_s = objectives.ttft_per_prompt_token_s * requests.input_tokens
    is_begun = answers.first_s <= (objectives.ttft_s + prompts_s).astype(np.float32)
    return np.asarray((answers.status == kernel.SERVED) & is_begun & is_paced)


def _service(requests: Requests, answers: Answers, objectives: Objectives) -> Service:
    is_served = answers.status == kernel.SERVED
    num, num_served = len(requests), int(is_served.sum())
    num_good = int(_met(requests, answers, objectives).sum())
    per_token_s = tpot_s(requests, answers)
    return Service(
        num_requests=num,
        num_served=num_served,
        num_failed=int((answers.status == kernel.FAILED).sum()),
        num_refused=int((answers.status == kernel.REFUSED).sum()),
        served_ratio=num_served / num if num else 1.0,
        slo_ratio=num_good / num if num else 1.0,
        ttft_s=_percentiles(answers.first_s[is_served]),
        tpot_s=_percentiles(per_token_s[is_served & ~np.isnan(per_token_s)]),
        num_moves=int(answers.moves.sum(dtype=np.int64)),
        stall_s=float(answers.stall_s.max(initial=0.0)),
    )


def _percentiles(values: kernel.F32) -> dict[int, float]:
    if not len(values):
        return dict.fromkeys(_PERCENTILES, float("nan"))
    found = np.percentile(values, _PERCENTILES).tolist()
    return dict(zip(_PERCENTILES, found, strict=True))


def _cost(
    seconds: Mapping[tuple[str, SliceState], float], classes: Sequence[ClassSetup], end_s: float
) -> SimulatedCost:
    by_class: dict[str, float] = {}
    committed_usd = 0.0
    for terms in (each.terms for each in classes):
        # Exact: a set has another order in each process, and the last bit of a plain sum with it.
        held_s = math.fsum(seconds.get((terms.name, state), 0.0) for state in HELD_STATES)
        paid_s = terms.max_slices * end_s if terms.is_prepaid else held_s
        by_class[terms.name] = paid_s / 3600 * terms.price
        if terms.is_prepaid:
            committed_usd += by_class[terms.name]
    return SimulatedCost(sum(by_class.values()), committed_usd, by_class)
