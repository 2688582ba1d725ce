"""Batches beside the requests of a day: what they add to its cost, and what requests feel of it.

A fifth of all tokens come as batches. A batch is submitted as soon as the one before it expires, so
that there is always one; each has the same number of lines, of which lengths are drawn from the
day's own requests, in pairs. A batch of the API has 50,000 lines at most: one here stands for as
many as are submitted at once.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autoscaling.simulator.offered import slices_per_request_per_s
from autoscaling.simulator.preparation import PreparedRun
from autoscaling.simulator.run import SimulationSetup
from autoscaling.simulator.world.arrivals import Requests, SimulatedBatch

_SHARE = 0.2
_HOUR_S = 3600.0
# Their windows, by name.
WINDOWS_S: Mapping[str, float] = {
    "batches of 1 h": _HOUR_S,
    "batches of 4 h": 4 * _HOUR_S,
    "batches of 24 h": 24 * _HOUR_S,
}


def batches_of(run: PreparedRun, window_s: float) -> tuple[SimulatedBatch, ...]:
    """The batches of a run's whole time; a window that would be cut short is left out."""
    requests, duration_s = run.requests, run.scenario.duration_s
    rng = np.random.default_rng([run.seed, round(window_s)])
    per_s = _SHARE / (1 - _SHARE) * len(requests) / duration_s
    num_lines = round(per_s * window_s)
    batches = []
    for number in range(int(duration_s // window_s)):
        picked = rng.integers(len(requests), size=num_lines)
        lines = Requests(
            np.zeros(num_lines), requests.input_tokens[picked], requests.output_tokens[picked]
        )
        batches.append(SimulatedBatch(number * window_s, window_s, lines))
    return tuple(batches)


def with_batches(setup: SimulationSetup, run: PreparedRun, window_s: float) -> SimulationSetup:
    """The setup of a run with batches of such a window."""
    return replace(setup, batches=batches_of(run, window_s))


def cost_on_spot(run: PreparedRun, batches: tuple[SimulatedBatch, ...]) -> float:
    """What the tokens of batches cost in USD on the cheapest spot class, if it were never dry.

    It is at the pace of the objective for later tokens, and nothing of a slice is left over.
    """
    spot = min(each.price for each in run.terms if each.is_revocable)
    given = np.concatenate([each.lines.input_tokens for each in batches])
    taken = np.concatenate([each.lines.output_tokens for each in batches])
    per_line = slices_per_request_per_s(
        run.scenario.profile,
        float(given.mean()),
        float(taken.mean()),
        run.rules.objectives.tpot_s,
    )
    return len(given) * per_line / _HOUR_S * spot
