"""Computes the engine time that work takes at the least, however its steps are mixed.

A step with `r` tokens of running sequences and `p` prompt tokens takes
`base_s + per_sequence_s * r + per_prompt_token_s * p` seconds (see `serving.domain.capacity`). The
tokens cost the same wherever they are computed, so the time is least where the steps are fewest.
If every request keeps the TPOT objective, the steps that running sequences see are no longer than
the objective on average. The fewest steps under that condition solve

    minimise    sum of x[r,p]
    subject to  sum of r * x[r,p]  = output tokens
                sum of p * x[r,p] >= prompt tokens
                sum of r * (step_s(r,p) - tpot_s) * x[r,p] <= 0

with `x[r,p]` steps of each kind, in fractions. Its prices of an output and of a prompt token bound
every other load too, so work can be counted request by request. Pure.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from serving.domain.capacity.slice_profile import CapacityProfile

Work = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LeastWork:
    """The least engine time of a token, in seconds, with its share of the steps' base time.

    `first_token_s` has no such share: TPOT does not count the step of the first token.
    """

    prompt_token_s: float
    first_token_s: float
    later_token_s: float

    def prompt_s(self, input_tokens: NDArray[np.int32]) -> Work:
        """Returns the time until the first token, per request."""
        return np.asarray(input_tokens * self.prompt_token_s + self.first_token_s)

    def decode_s(self, output_tokens: NDArray[np.int32]) -> Work:
        """Returns the time of the tokens after the first, per request."""
        return np.asarray((output_tokens - 1) * self.later_token_s)


def least_work(
    profile: CapacityProfile, tpot_s: float, input_tokens: float, later_tokens: float
) -> LeastWork:
    """The least work per token, as tight as can be for so many prompt and later tokens in all.

    Raises:
        ValueError: even an idle engine's step is longer than `tpot_s`.
    """
    if tpot_s <= profile.base_s:
        raise ValueError(
            f"tpot_s is {tpot_s:g}; allowed: more than base_s of the profile, {profile.base_s:g}"
        )
    most = min(profile.max_num_seqs, profile.max_num_batched_tokens)
    # For a given number of sequences all is linear in the prompt tokens: none and all are enough.
    running = np.tile(np.arange(most + 1, dtype=np.float64), 2)
    prompt = np.concatenate(
        [np.zeros(most + 1), profile.max_num_batched_tokens - running[: most + 1]]
    )
    step_s = profile.base_s + profile.per_sequence_s * running
    step_s += profile.per_prompt_token_s * prompt
    # Per token, so that the solver sees numbers near 1.
    total = max(input_tokens + later_tokens, 1e-9)
    answer = linprog(
        np.ones(len(running)),
        A_eq=running[None, :],
        b_eq=[later_tokens / total],
        A_ub=np.stack([-prompt, running * (step_s - tpot_s)]),
        b_ub=[-input_tokens / total, 0.0],
        method="highs",
    )
    # Short enough steps of one sequence always keep the objective.
    assert answer.status == 0, answer.message
    per_later = max(0.0, float(answer.eqlin.marginals[0]))
    per_prompt = max(0.0, float(-answer.ineqlin.marginals[0]))
    return LeastWork(
        profile.per_prompt_token_s + profile.base_s * per_prompt,
        profile.per_sequence_s,
        profile.per_sequence_s + profile.base_s * per_later,
    )
