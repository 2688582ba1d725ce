"""The instants of a workload's arrivals, for every law.

Owns the way from a stated law or trace to instants, and how a trace is sped up, thinned and
repeated. Does not own the mathematics of a rate (`arrivals`, `servegen`). Reads the files that the
law names; chance comes in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.workload.arrival_laws import (
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RampArrivals,
    RatePoint,
    ReplayArrivals,
    ServegenArrivals,
    StepArrivals,
)
from loadtest.workload.arrivals import Instants, instants, ramp, steady, steps, thin
from loadtest.workload.servegen import client_instants, mean_rate_per_s, read_clients
from loadtest.workload.traces import Trace, TraceRow

RateLaw = ConstantArrivals | PoissonArrivals | GammaArrivals | RampArrivals | StepArrivals

# What a process plans at most: about 1 GB of plans.
MAX_REQUESTS = 1_000_000

# The rows of one conversation: a session's in order, or one alone.
Unit = tuple[TraceRow, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The conversation that comes at `offset_s`, after the trace was played `playing` times."""

    offset_s: float
    unit: Unit
    playing: int


def rate_instants(law: RateLaw, duration_s: float, rng: np.random.Generator) -> Instants:
    """Returns arrivals under a stated rate, in ascending order, in seconds.

    Raises:
        LoadTestError: more than a process can plan.
    """
    match law:
        case ConstantArrivals():
            pieces, cv = steady(law.rate_per_s, duration_s), 0.0
        case PoissonArrivals():
            pieces, cv = steady(law.rate_per_s, duration_s), 1.0
        case GammaArrivals():
            pieces, cv = steady(law.rate_per_s, duration_s), law.cv
        case RampArrivals():
            pieces, cv = ramp(_pairs(law.points), duration_s), law.cv
        case StepArrivals():
            pieces, cv = steps(_pairs(law.points), duration_s), law.cv
        case _:
            assert_never(law)
    _check_count(sum(piece.expected for piece in pieces))
    return instants(pieces, cv, rng)


def servegen_instants(
    law: ServegenArrivals, duration_s: float, rng: np.random.Generator
) -> Instants:
    """Returns arrivals of all clients of ServeGen's together, in ascending order, in seconds.

    Raises:
        LoadTestError: all clients are idle throughout, or more than a process can plan.
        TraceError: a file of laws cannot be read.
    """
    clients = read_clients(law.trace)
    known_per_s = mean_rate_per_s(clients, law.start_s, duration_s)
    if known_per_s == 0:
        raise LoadTestError(f"{law.trace}: nothing arrives in {duration_s:g} s from start_s on")
    factor = law.scale if law.rate_per_s is None else law.rate_per_s / known_per_s
    _check_count(known_per_s * factor * duration_s)
    found = [
        client_instants(client.stretch(law.start_s, duration_s), factor, child)
        for client, child in zip(clients, rng.spawn(len(clients)), strict=True)
    ]
    return np.sort(np.concatenate(found))


def replayed(
    law: ReplayArrivals, trace: Trace, duration_s: float, rng: np.random.Generator
) -> tuple[Replayed, ...]:
    """Returns what of the trace arrives within the run, by time.

    Raises:
        LoadTestError: `rate_per_s` is above what the trace has; it or `repeat` is set, but all
            rows come at once; or more than a process can plan.
        TraceError: the trace has no times.
    """
    length_s = _length_s(trace) / law.scale
    units = [
        (float(unit[0].offset_s or 0.0) / law.scale, unit) for unit in units_of(trace.spread(rng))
    ]
    if length_s == 0 and (law.repeat or law.rate_per_s is not None):
        raise LoadTestError(f"{trace.path}: all of it comes at once; allowed: two times at least")
    num_playings = math.ceil(duration_s / length_s) if law.repeat else 1
    _check_count(len(units) * num_playings)
    found = [
        Replayed(playing * length_s + at_s, unit, playing)
        for playing in range(num_playings)
        for at_s, unit in units
        if playing * length_s + at_s < duration_s
    ]
    if law.rate_per_s is None:
        return tuple(found)
    played_s = duration_s if law.repeat else min(duration_s, length_s)
    keep_ratio = law.rate_per_s * played_s / len(found)
    if keep_ratio > 1:
        raise LoadTestError(
            f"rate_per_s is {law.rate_per_s:g}; allowed: at most {len(found) / played_s:.3g}, "
            f"what {trace.path} has in the {played_s:.0f} s that are played; scale makes it faster"
        )
    stays = thin(len(found), keep_ratio, rng)
    return tuple(instant for instant, kept in zip(found, stays, strict=True) if kept)


def units_of(trace: Trace) -> tuple[Unit, ...]:
    """The rows of a trace, those of one session together; by their first rows' order."""
    units: dict[str | int, list[TraceRow]] = {}
    for number, row in enumerate(trace.rows):
        units.setdefault(number if row.session is None else row.session, []).append(row)
    return tuple(tuple(rows) for rows in units.values())


def _length_s(trace: Trace) -> float:
    """Returns the time from the first arrival to the next after the last, at the mean gap."""
    last_s = float(trace.offsets_s[-1])
    return last_s + last_s / max(len(trace.rows) - 1, 1)


def _pairs(points: Sequence[RatePoint]) -> list[tuple[float, float]]:
    return [(point.at_s, point.rate_per_s) for point in points]


def _check_count(expected: float) -> None:
    if expected > MAX_REQUESTS:
        raise LoadTestError(
            f"about {expected:.3g} requests in all; allowed: at most {MAX_REQUESTS:g}"
        )
