"""Computes a plan with hindsight: whole slices for a future that is known.

Knows every arrival and every compute class's capacity for the whole run and chooses, for each
interval and class, how many slices are ready and how many start, at the least cost:

    minimise    sum over c, k of  price_c * (interval * ready[c,k] + load_s * started[c,k])
    subject to  sum over c of carries_c * ready[c,k] + short[k] >= demand[k]
                started[c,k] >= ready[c,k] - ready[c,k-1]
                ready[c,k] + what starts within load_s after k <= capacity[c,k]
                sum over c not in g of carries_c * ready[c,k] + short[k] >= floor[k]
                                                                 for each group g

`short` is demand that no class can carry; it costs so much that it is the last resort. `floor`, if
there is one, is left whichever group of revocable classes is lost, though none is that is not known
of. Prepaid slices cost the same used or not. Slices are whole, loading is rounded up to intervals,
and of each interval the least capacity counts (HiGHS). The plan is one that could have been
followed. It is no lower bound: a policy that carries work over, or needs less than `demand`, may
cost less (`lower_bound`). It knows neither of losses within a class's capacity, nor of provisioning
(slices are asked for ahead of time), nor of queueing. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix, csr_matrix

from autoscaling.records import Observation, Plan
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.compute_class import ComputeClass

# More expensive than any way to carry the demand: an hour of it costs so many times the top price.
_SHORTAGE_FACTOR = 100.0
_SECONDS_PER_HOUR = 3600.0


class HindsightError(RuntimeError):
    """The solver found no answer; the message is its own. Solve over longer intervals."""


@dataclass(frozen=True, slots=True)
class HindsightProblem:
    """What is known. `demand` is in slices per interval, and `capacity`, by class name, too.

    `initial` are the slices that are ready when the run begins, by class: others are ready only
    once they could have come. `None`: slices may have been ordered before the run. The floor is
    `floor_ratio` of the demand, in whole slices. `carries` has how many of the slices that demand
    is counted in one of a class is worth, by name; 1 without.
    """

    interval_s: float
    demand: NDArray[np.float64]
    terms: tuple[ComputeClass, ...]
    capacity: Mapping[str, NDArray[np.int64]]
    initial: Mapping[str, int] | None = None
    floor_ratio: float = 0.0
    carries: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HindsightPlan:
    """The plan: slices per interval, by class, and what they cost with what is prepaid.

    `short_slice_hours` is the demand that no class could carry.
    """

    cost_usd: float
    ready: Mapping[str, NDArray[np.int64]]
    short_slice_hours: float
    interval_s: float


def plan_with_hindsight(problem: HindsightProblem, *, time_limit_s: float = 60.0) -> HindsightPlan:
    """The cheapest plan for `problem`.

    Raises:
        HindsightError: the solver gave up within `time_limit_s`.
    """
    whole = _solve(problem, time_limit_s=time_limit_s)
    ready = {
        terms.name: np.rint(whole.ready[index]).astype(np.int64)
        for index, terms in enumerate(problem.terms)
    }
    short_h = float(whole.short.sum()) * problem.interval_s / _SECONDS_PER_HOUR
    return HindsightPlan(whole.cost_usd + _prepaid_usd(problem), ready, short_h, problem.interval_s)


def least_slices(
    series: CapacitySeries | None, max_slices: int, num_intervals: int, interval_s: float
) -> NDArray[np.int64]:
    """The least of a capacity series per interval; `None` is always `max_slices`."""
    if series is None:
        return np.full(num_intervals, max_slices, np.int64)
    times_s, slices = np.array(series.times_s), np.array(series.slices, np.int64)
    starts_s = np.arange(num_intervals) * interval_s
    first = np.searchsorted(times_s, starts_s, side="right") - 1
    last = np.searchsorted(times_s, starts_s + interval_s, side="left") - 1
    least = [slices[a : b + 1].min() for a, b in zip(first, last, strict=True)]
    return np.asarray(np.minimum(least, max_slices), np.int64)


class HindsightPolicy:
    """Follows a plan: each class is asked as long ahead as its slices take to be ready."""

    name = "hindsight"

    def __init__(self, terms: Sequence[ComputeClass], known: HindsightPlan) -> None:
        self._terms, self._known = tuple(terms), known

    def decide(self, observation: Observation) -> Plan:
        """The most slices of each class in the plan from now until one would be ready."""
        targets = {each.name: self._target(each, observation.now_s) for each in self._terms}
        return Plan(observation.now_s, targets, arithmetic="as the plan with hindsight says")

    def _target(self, terms: ComputeClass, now_s: float) -> int:
        if terms.is_prepaid:
            return terms.max_slices
        ready, interval_s = self._known.ready[terms.name], self._known.interval_s
        lead_s = terms.provisioning_s + terms.load_s
        first = min(int(now_s / interval_s), len(ready) - 1)
        last = min(int((now_s + lead_s) / interval_s), len(ready) - 1)
        return max(terms.min_slices, int(ready[first : last + 1].max()))


@dataclass(frozen=True, slots=True)
class _Solution:
    """The solution of one problem. `cost_usd` excludes what is prepaid and the price of `short`."""

    cost_usd: float
    ready: NDArray[np.float64]  # [class, interval]
    short: NDArray[np.float64]  # [interval]


def _prepaid_usd(problem: HindsightProblem) -> float:
    hours = len(problem.demand) * problem.interval_s / _SECONDS_PER_HOUR
    return sum(each.max_slices * each.price * hours for each in problem.terms if each.is_prepaid)


def _solve(problem: HindsightProblem, *, time_limit_s: float) -> _Solution:
    """Solves the problem. Variables: ready[c,k], then started[c,k], then short[k]."""
    num_classes, num_intervals = len(problem.terms), len(problem.demand)
    block = num_classes * num_intervals
    cost = _costs(problem)
    most = np.stack(
        [np.minimum(problem.capacity[each.name], each.max_slices) for each in problem.terms]
    ).astype(np.float64)
    least = np.stack(
        [
            np.minimum(0 if terms.is_prepaid else terms.min_slices, most[index])
            for index, terms in enumerate(problem.terms)
        ]
    )
    reachable = np.minimum(most, _reachable(problem))
    least = np.minimum(least, reachable)
    unbounded = np.full(block + num_intervals, np.inf)
    upper = np.concatenate([reachable.ravel(), unbounded])
    lower = np.concatenate([least.ravel(), np.zeros(block + num_intervals)])
    integrality = np.zeros(2 * block + num_intervals)
    integrality[:block] = 1
    answer = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(lower, upper),
        constraints=[
            LinearConstraint(_coverage(problem, problem.terms), problem.demand, np.inf),
            *_floors(problem),
            LinearConstraint(_starts(num_classes, num_intervals), -np.inf, _before(problem)),
            LinearConstraint(_holding(problem), -np.inf, most.ravel()),
        ],
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-3},
    )
    # A plan only has to be feasible.
    if answer.x is None:
        raise HindsightError(f"no solution within {time_limit_s:g} s: {answer.message}")
    values = np.asarray(answer.x, dtype=np.float64)
    short = values[2 * block :]
    return _Solution(
        float(cost[: 2 * block] @ values[: 2 * block]),
        values[:block].reshape(num_classes, num_intervals),
        short,
    )


def _costs(problem: HindsightProblem) -> NDArray[np.float64]:
    num_intervals, hours = len(problem.demand), problem.interval_s / _SECONDS_PER_HOUR
    held, started = [], []
    for terms in problem.terms:
        usd = 0.0 if terms.is_prepaid else terms.price
        # A slice that ends after max_run_s is loaded again: that share of each hour is paid on top.
        again = 1 + terms.load_s / terms.max_run_s if terms.max_run_s else 1.0
        held.append(np.full(num_intervals, usd * hours * again))
        started.append(np.full(num_intervals, usd * terms.load_s / _SECONDS_PER_HOUR))
    most_expensive = max(each.price for each in problem.terms) or 1.0
    short = np.full(num_intervals, _SHORTAGE_FACTOR * most_expensive * hours)
    return np.concatenate([*held, *started, short])


def _reachable(problem: HindsightProblem) -> NDArray[np.float64]:
    """The most slices of each class that can be ready in each interval, capacity aside."""
    reachable = np.full((len(problem.terms), len(problem.demand)), np.inf)
    for index, terms in enumerate(problem.terms if problem.initial is not None else ()):
        span = (terms.provisioning_s + terms.load_s) / problem.interval_s
        reachable[index, : math.ceil(span)] = _initial(problem, terms)
    return reachable


def _before(problem: HindsightProblem) -> NDArray[np.float64]:
    """Returns the slices ready before each class's first interval, and 0 for later intervals."""
    found = np.zeros((len(problem.terms), len(problem.demand)))
    found[:, 0] = [_initial(problem, terms) for terms in problem.terms]
    return found.ravel()


def _initial(problem: HindsightProblem, terms: ComputeClass) -> int:
    return 0 if problem.initial is None else problem.initial.get(terms.name, 0)


def _coverage(problem: HindsightProblem, terms: Sequence[ComputeClass]) -> csr_matrix:
    """Builds the rows k: ready of these classes, by what they carry, and what is short."""
    num_classes, num_intervals = len(problem.terms), len(problem.demand)
    block, k = num_classes * num_intervals, np.arange(num_intervals)
    places = [place for place, each in enumerate(problem.terms) if each in terms]
    columns = [place * num_intervals + k for place in places] + [2 * block + k]
    rows = np.tile(k, len(places) + 1)
    worth = [problem.carries.get(problem.terms[place].name, 1.0) for place in places] + [1.0]
    values = np.repeat(worth, num_intervals)
    shape = (num_intervals, 2 * block + num_intervals)
    return coo_matrix((values, (rows, np.concatenate(columns))), shape=shape).tocsr()


def _floors(problem: HindsightProblem) -> list[LinearConstraint]:
    """Builds for each group the rows k: ready of every class outside of it, and what is short."""
    if not problem.floor_ratio:
        return []
    floor = np.ceil(problem.floor_ratio * problem.demand)
    groups = {each.lost_with for each in problem.terms if each.lost_with is not None}
    return [
        LinearConstraint(
            _coverage(problem, [each for each in problem.terms if each.lost_with != group]),
            floor,
            np.inf,
        )
        for group in sorted(groups)
    ]


def _starts(num_classes: int, num_intervals: int) -> csr_matrix:
    """Builds the rows (c, k): ready - ready before - started."""
    block = num_classes * num_intervals
    row = np.arange(block)
    has_before = row % num_intervals > 0
    rows = np.concatenate([row, row[has_before], row])
    columns = np.concatenate([row, row[has_before] - 1, block + row])
    values = np.concatenate([np.ones(block), -np.ones(has_before.sum()), -np.ones(block)])
    shape = (block, 2 * block + num_intervals)
    return coo_matrix((values, (rows, columns)), shape=shape).tocsr()


def _holding(problem: HindsightProblem) -> csr_matrix:
    """Builds the rows (c, k): ready, and what is loading in k to be ready later."""
    num_classes, num_intervals = len(problem.terms), len(problem.demand)
    block, k = num_classes * num_intervals, np.arange(num_intervals)
    rows, columns = [np.arange(block)], [np.arange(block)]
    for index, terms in enumerate(problem.terms):
        span = terms.load_s / problem.interval_s
        for ahead in range(1, math.ceil(span) + 1):
            within = k[: num_intervals - ahead]
            rows.append(index * num_intervals + within)
            columns.append(block + index * num_intervals + within + ahead)
    row, column = np.concatenate(rows), np.concatenate(columns)
    shape = (block, 2 * block + num_intervals)
    return coo_matrix((np.ones(len(row)), (row, column)), shape=shape).tocsr()
