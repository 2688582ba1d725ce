"""The parameters that every baseline is given: what one slice is to carry, from the same profile.

An operator of any of these autoscalers would measure how much one replica carries within the
objectives and aim somewhat below it; here the measuring is done by the profile that our own policy
has too. `HEADROOM` is that "somewhat". Pure.
"""

from dataclasses import dataclass

from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile

# Share of a slice's limit to aim at. The Kubernetes documentation's and KEDA's own examples aim at
# 0.5 to 0.8 of a limit; the generous end for the cost is the high one.
HEADROOM = 0.8


@dataclass(frozen=True, slots=True)
class Sizing:
    """The planned load of one slice: requests per second, and requests on it at that rate."""

    requests_per_s: float
    in_flight: float


def size(
    profile: CapacityProfile,
    objectives: Objectives,
    input_tokens: float,
    output_tokens: float,
    headroom: float = HEADROOM,
) -> Sizing:
    """The sizing for a trace's mean lengths, at `headroom` of a slice's limit.

    Raises:
        ValueError: the objective is shorter than an idle engine's step.
    """
    limit = profile.max_requests_per_s(input_tokens, output_tokens, objectives.tpot_s)
    if limit <= 0:
        raise ValueError(
            f"tpot_s is {objectives.tpot_s:g}; allowed: more than base_s, {profile.base_s:g}"
        )
    rate = headroom * limit
    step_s = profile.step_s(rate, input_tokens, output_tokens)
    stay_s = profile.ttft_floor_s + input_tokens * profile.per_prompt_token_s
    stay_s += output_tokens * step_s
    return Sizing(rate, max(1.0, rate * stay_s))
