"""Builds the requests of a run from a workload and a seed.

Joins the instants (`schedule`) with what is requested at them (`conversations`). Reads the traces
that the workload names; the rest is pure, and the same in any process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.planned_request import PlannedRequest
from loadtest.workload.arrival_laws import ClosedArrivals, ReplayArrivals, ServegenArrivals
from loadtest.workload.conversations import Planner, planner, seed_of
from loadtest.workload.schedule import Unit, rate_instants, replayed, servegen_instants, units_of
from loadtest.workload.spec import WorkloadSpec
from loadtest.workload.traces import TraceError, read_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run.

    `requests` are those of an open loop, by `offset_s`, a session's later turns right after its
    first; empty for a closed loop. `num_users` is the closed loop's, `None` for an open one.
    """

    requests: tuple[PlannedRequest, ...]
    num_users: int | None
    _planner: Planner

    def closed_loop(self, worker: int, num_workers: int) -> Iterator[tuple[PlannedRequest, ...]]:
        """The conversations for the users of one of `num_workers` processes, without end.

        A user takes the next one after finishing one. A request is due its `think_time_s` after
        the answer before.

        Raises:
            LoadTestError: the workload is an open loop.
        """
        if self.num_users is None:
            raise LoadTestError("a closed loop was asked of an open one; allowed: its requests")
        return (
            self._planner.conversation(index, None, *self._planner.rows_of(index))
            for index in count(worker, num_workers)
        )


def build_workload(
    spec: WorkloadSpec, *, models: Sequence[str], duration_s: float, seed: int
) -> Workload:
    """The requests that `spec` means for a run of `duration_s` against `models`.

    Arrivals, lengths and choices follow from the seed, prompts from the seed and the workload, so
    that runs of two workloads do not find each other's prompts in the server's cache.

    Raises:
        LoadTestError: a model that is not there, a trace that cannot be read or lacks what the
            workload needs, or more requests than a process can plan.
    """
    if not duration_s > 0:
        raise LoadTestError(f"duration_s is {duration_s:g}; allowed: above 0")
    try:
        return _built(spec, models, duration_s, seed)
    except TraceError as error:
        raise LoadTestError(str(error)) from error


def _built(spec: WorkloadSpec, models: Sequence[str], duration_s: float, seed: int) -> Workload:
    rng = np.random.default_rng(seed_of(seed, "arrivals"))
    plans = planner(spec, models, seed, _shuffled_units(spec, seed))
    law = spec.arrivals
    if isinstance(law, ClosedArrivals):
        return Workload((), law.num_users, plans)
    if isinstance(law, ReplayArrivals):
        played = replayed(law, read_trace(law.trace), duration_s, rng)
        conversations = [
            plans.conversation(index, replay.offset_s, replay.unit, replay.playing, law.scale)
            for index, replay in enumerate(played)
        ]
    else:
        at_s = (
            servegen_instants(law, duration_s, rng)
            if isinstance(law, ServegenArrivals)
            else rate_instants(law, duration_s, rng)
        )
        conversations = [
            plans.conversation(index, offset_s, *plans.rows_of(index))
            for index, offset_s in enumerate(at_s.tolist())
        ]
    return Workload(tuple(turn for turns in conversations for turn in turns), None, plans)


def _shuffled_units(spec: WorkloadSpec, seed: int) -> tuple[Unit, ...] | None:
    """The conversations of `lengths.trace` in the order they are taken; `None` without one."""
    if spec.lengths is None or spec.lengths.trace is None:
        return None
    units = units_of(read_trace(spec.lengths.trace))
    order = np.random.default_rng(seed_of(seed, "rows")).permutation(len(units))
    return tuple(units[index] for index in order.tolist())
