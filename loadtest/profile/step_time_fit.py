"""Fits the coefficients of a step's time to measured steps by non-negative least squares. Pure.

The law of `serving.domain.capacity`, with the prompt tokens of a step written as a rate:

    step_s = base_s + per_sequence_s * running + per_prompt_token_s * (prompt_tokens_per_s * step_s)

is linear in its coefficients, and everything else in it can be observed from outside: the mean TPOT
is the step, running requests and prompt tokens are what the load test sends. Each observation
weighs by its inverse step, so that relative and not absolute errors count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The result of one steady load; `running` is the mean number of requests in the engine."""

    running: float
    prompt_tokens_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """The coefficients, and `worst_error`: the largest relative difference from an observation."""

    base_s: float
    per_sequence_s: float
    per_prompt_token_s: float
    worst_error: float

    def step_s(self, running: float, prompt_tokens_per_s: float) -> float:
        """The step at such a load; infinite where prompts alone take more than all time."""
        left = 1 - self.per_prompt_token_s * prompt_tokens_per_s
        return (self.base_s + self.per_sequence_s * running) / left if left > 0 else float("inf")


class UnfitError(ValueError):
    """The observations do not separate the coefficients. Measure at more loads."""


def fit_step_time(observations: Sequence[SteadyState]) -> StepTimeFit:
    """The coefficients that fit best.

    Raises:
        UnfitError: fewer than three observations, or too much alike.
    """
    if len(observations) < 3:
        raise UnfitError(f"{len(observations)} observations; at least 3 are needed")
    rows = np.array(
        [
            [1.0, observation.running, observation.prompt_tokens_per_s * observation.step_s]
            for observation in observations
        ]
    )
    steps = np.array([observation.step_s for observation in observations])
    if (steps <= 0).any():
        raise UnfitError("a step of 0 s was observed")
    weighted = rows / steps[:, None]
    # Columns of one size, or the rank would be judged by the units.
    sizes = np.linalg.norm(weighted, axis=0)
    if (sizes == 0).any() or np.linalg.matrix_rank(weighted / sizes, tol=1e-3) < 3:
        raise UnfitError("the loads are too much alike: vary the streams and the prompt lengths")
    scaled, _ = nnls(weighted / sizes, np.ones(len(steps)))
    base_s, per_sequence_s, per_prompt_token_s = (float(value) for value in scaled / sizes)
    fit = StepTimeFit(base_s, per_sequence_s, per_prompt_token_s, 0.0)
    errors = [
        abs(
            fit.step_s(observation.running, observation.prompt_tokens_per_s) / observation.step_s
            - 1
        )
        for observation in observations
    ]
    return StepTimeFit(base_s, per_sequence_s, per_prompt_token_s, max(errors))
