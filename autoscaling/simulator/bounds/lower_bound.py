"""Computes a lower bound of the cost of a day: no policy that keeps the service level costs less.

It is a linear programme over the mean work of each interval. Work comes when its request arrives
and is due when the objectives say, and between the two it may be carried over to wherever slices
are cheap:

    minimise    sum over c, k of  price_c * used[c,k]
    subject to  used[c,k] <= most slices of c in k
                done[k] - done[k-1] <= sum over c of carries_c * used[c,k]
                due[k] - missed[k] <= done[k] <= arrived[k]
                done and missed never fall; missed <= work of the largest requests that may miss

in slice-seconds, summed up to the end of interval `k` for done, due, missed and arrived. Work is
counted in slices of one shape, of which a slice of class `c` does the work of `carries_c` at most:
as it does of the kind of token for which it is the best. Whatever
would make it dearer is left out: slices come in fractions and at once, loading costs nothing,
nothing is lost but what capacity takes, and work is as cheap as `step_mix` allows. Prepaid slices
cost the same used or not.

With `Loading` a slice is also paid for while it loads, so that every rise of what is used costs as
well:

    minimise    sum over c, k of  price_c * (used[c,k] + load_s_c * started[c,k])
    subject to  started[c,k] >= (used[c,k] - used[c,k-1]) / interval_s

What serves for a part of an interval counts by its mean, and the mean of what is used rises no more
often than what is used itself does: it stays a bound. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import (
    block_diag,
    coo_matrix,
    csr_matrix,
    diags_array,
    eye_array,
    hstack,
    vstack,
)

from autoscaling.simulator.bounds.step_mix import least_work
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass

_SECONDS_PER_HOUR = 3600.0

Series = NDArray[np.float64]  # [interval]


class LowerBoundError(RuntimeError):
    """The classes cannot carry the work at all, or the solver gave up; the message is its own."""


@dataclass(frozen=True, slots=True)
class MeanWork:
    """The work of `duration_s` in slice-seconds.

    `arrived` and `due` are sums up to each interval's end. `may_miss` is the most work that the
    requests have that may miss their objectives.
    """

    duration_s: float
    interval_s: float
    arrived: Series
    due: Series
    may_miss: float


@dataclass(frozen=True, slots=True)
class Loading:
    """What loading takes, in seconds, and the slices that are ready at the start, by class."""

    load_s: Mapping[str, float]
    initial: Mapping[str, int]


def mean_work(
    requests: Requests,
    profile: CapacityProfile,
    *,
    objectives: Objectives,
    duration_s: float,
    service_level: float,
    interval_s: float = 60.0,
) -> MeanWork:
    """The work of these requests, of which a share of `service_level` keeps both objectives.

    What is due after `duration_s` is not due at all.

    Raises:
        ValueError: even an idle engine's step is longer than the objective.
    """
    tpot_s = objectives.tpot_s
    later = requests.output_tokens - 1
    least = least_work(profile, tpot_s, float(requests.input_tokens.sum()), float(later.sum()))
    prompt_s = least.prompt_s(requests.input_tokens)
    decode_s = least.decode_s(requests.output_tokens)
    num_intervals = max(1, int(np.ceil(duration_s / interval_s)))
    ends_s = np.minimum(np.arange(1, num_intervals + 1) * interval_s, duration_s)
    for_prompts_s = objectives.ttft_per_prompt_token_s * requests.input_tokens
    first_by_s = requests.arrival_s + objectives.ttft_s + for_prompts_s
    whole_s = prompt_s + decode_s
    due = _summed(first_by_s, prompt_s, ends_s) + _summed(
        first_by_s + tpot_s * later, decode_s, ends_s
    )
    num_missing = int((1 - service_level) * len(requests) + 1e-9)
    largest = np.sort(whole_s)[len(whole_s) - num_missing :]
    arrived = _summed(requests.arrival_s, whole_s, ends_s)
    return MeanWork(duration_s, interval_s, arrived, due, float(largest.sum()))


def most_slices(
    series: CapacitySeries | None,
    max_slices: int,
    num_intervals: int,
    interval_s: float,
    grace_s: float,
) -> Series:
    """The most slices that a class gives at any instant of each interval.

    `series` is its capacity, `None`: always `max_slices`. A slice that is taken away serves for
    another `grace_s`.
    """
    if series is None:
        return np.full(num_intervals, float(max_slices))
    times_s, slices = np.array(series.times_s), np.array(series.slices)
    starts_s = np.arange(num_intervals) * interval_s
    first = np.searchsorted(times_s, np.maximum(starts_s - grace_s, 0.0), side="right") - 1
    last = np.searchsorted(times_s, starts_s + interval_s, side="left") - 1
    most = [slices[a : b + 1].max() for a, b in zip(first, last, strict=True)]
    return np.minimum(np.array(most, np.float64), max_slices)


def most_carried(
    requests: Requests, base: CapacityProfile, other: CapacityProfile, *, tpot_s: float
) -> float:
    """The most slices of `base` whose work one of `other` can do, whatever is asked of it.

    Raises:
        ValueError: even an idle engine's step of either is longer than `tpot_s`.
    """
    prompt_tokens = float(requests.input_tokens.sum())
    later_tokens = float((requests.output_tokens - 1).sum())
    one, two = (least_work(each, tpot_s, prompt_tokens, later_tokens) for each in (base, other))
    kinds = ("prompt_token_s", "first_token_s", "later_token_s")
    return max(_ratio(getattr(one, kind), getattr(two, kind)) for kind in kinds)


def lower_bound_usd(
    work: MeanWork,
    terms: Sequence[ComputeClass],
    most: Mapping[str, Series],
    carries: Mapping[str, float] | None = None,
    loading: Loading | None = None,
) -> float:
    """The least cost of `work`; `most` slices per interval are by the name of the class.

    `carries` has how many slices' work one of a class does at most, by its name; without a class,
    and where it is `None`, it is 1. Without `loading` it costs nothing.

    Raises:
        LowerBoundError: there is no such plan.
    """
    num_classes, num_intervals = len(terms), len(work.due)
    usd_per_s = [0.0 if each.is_prepaid else each.price / _SECONDS_PER_HOUR for each in terms]
    # Variables: used[c,k], then done[k], missed[k], and started[c,k] where loading counts.
    cost = [np.repeat(usd_per_s, num_intervals), np.zeros(2 * num_intervals)]
    upper = [
        *(most[each.name] * work.interval_s for each in terms),
        work.arrived,
        np.full(num_intervals, work.may_miss),
    ]
    rows = _constraints([(carries or {}).get(each.name, 1.0) for each in terms], num_intervals)
    bounds = [np.zeros(3 * num_intervals), -work.due]
    if loading is not None:
        per_start = [
            usd * loading.load_s[each.name] for usd, each in zip(usd_per_s, terms, strict=True)
        ]
        cost.append(np.repeat(per_start, num_intervals))
        upper.append(np.full(num_classes * num_intervals, np.inf))
        rows = _with_starts(rows, num_classes, num_intervals, work.interval_s)
        for each in terms:
            before = np.zeros(num_intervals)
            before[0] = loading.initial.get(each.name, 0)
            bounds.append(before)
    answer = linprog(
        np.concatenate(cost),
        A_ub=rows,
        b_ub=np.concatenate(bounds),
        bounds=np.stack([np.zeros(rows.shape[1]), np.concatenate(upper)], axis=1),
        method="highs",
    )
    if answer.status != 0:
        raise LowerBoundError(f"no lower bound: {answer.message}")
    hours = work.duration_s / _SECONDS_PER_HOUR
    prepaid = sum(each.max_slices * each.price * hours for each in terms if each.is_prepaid)
    return float(answer.fun) + prepaid


def _summed(at_s: Series, amounts: Series, ends_s: Series) -> Series:
    """Returns the sums of what lies before each end; `at_s` need not be in order."""
    order = np.argsort(at_s, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(amounts[order])])
    return np.asarray(sums[np.searchsorted(at_s[order], ends_s, side="left")])


def _ratio(one: float, two: float) -> float:
    return one / two if two > 0 else math.inf if one > 0 else 0.0


def _constraints(carries: Sequence[float], num_intervals: int) -> csr_matrix:
    """Builds four rows per interval, each at most its bound.

    Done less done before and what is used, by what it carries; done before less done; missed
    before less missed; minus done and missed.
    """
    num_classes = len(carries)
    block, k = num_classes * num_intervals, np.arange(num_intervals)
    done, missed = block + k, block + num_intervals + k
    later, ones = k[1:], np.ones(num_intervals)
    entries = [(k, done, ones), (later, done[:-1], -ones[1:])]
    entries += [(k, c * num_intervals + k, -each * ones) for c, each in enumerate(carries)]
    for place, column in ((1, done), (2, missed)):
        rows = place * num_intervals + k
        entries += [(rows, column, -ones), (rows[1:], column[:-1], ones[1:])]
    entries += [(3 * num_intervals + k, column, -ones) for column in (done, missed)]
    rows_, columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    shape = (4 * num_intervals, block + 2 * num_intervals)
    return coo_matrix((values, (rows_, columns)), shape=shape).tocsr()


def _with_starts(
    rows: csr_matrix, num_classes: int, num_intervals: int, interval_s: float
) -> csr_matrix:
    """Adds started[c,k], and a row for each: what is used less what was before, less started."""
    block = num_classes * num_intervals
    rise = diags_array([1.0, -1.0], offsets=[0, -1], shape=(num_intervals, num_intervals))
    starts = hstack(
        [
            block_diag([rise / interval_s] * num_classes),
            csr_matrix((block, rows.shape[1] - block)),
            -eye_array(block),
        ]
    )
    widened = hstack([rows, csr_matrix((rows.shape[0], block))])
    return vstack([widened, starts]).tocsr()
