"""What work takes on each engine beside the others, by the laws of their steps. Pure.

The unit is a 64th of the time in which the usual engine computes a token of a prompt, so that all
costs are whole numbers. What a step and a sequence take of the usual one stays as it is for a chip
(`USUAL_LAW`), whatever its own steps say: a sequence also takes of the cache what others would find
there, and with the parts of its steps alone engines gave more of it up than they gained. Laws say
how much slower or quicker than the usual one an engine is.

Laws are measured, and those of equal engines differ a little: what lies within a quarter of the
usual one counts as usual, so that equal engines stay equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from serving.domain.capacity.step_law import USUAL_LAW, StepLaw

# Of one token of a prompt at the usual engine.
UNITS_PER_TOKEN = 64
_NEARLY = 1.25
# Engines are compared by steps that only decode so many sequences, and by the computing of prompts.
_SEQUENCES = 16.0


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What a token of a prompt takes of an engine, a step, and each sequence in it, in units."""

    token: int
    step: int
    sequence: int

    def times(self, prompts: float, steps: float) -> "EngineCosts":
        """Returns the costs of an engine that takes so many times as long for each of both."""
        token, step, sequence = self.token * prompts, self.step * steps, self.sequence * steps
        return EngineCosts(max(1, round(token)), round(step), round(sequence))


def _in_units(part_s: float) -> int:
    return round(UNITS_PER_TOKEN * part_s / USUAL_LAW.per_prompt_token_s)


USUAL_COSTS = EngineCosts(
    UNITS_PER_TOKEN, _in_units(USUAL_LAW.base_s), _in_units(USUAL_LAW.per_sequence_s)
)


def costs_of(laws: Mapping[str, StepLaw | None]) -> dict[str, EngineCosts]:
    """Returns the costs of engines by id. One that has told no law is taken to be as usual."""
    known = [law for law in laws.values() if law is not None]
    if not known:
        return dict.fromkeys(laws, USUAL_COSTS)
    usual = StepLaw(*(_middle(each) for each in zip(*known, strict=True)))
    return {engine_id: _beside(law or usual, usual) for engine_id, law in laws.items()}


def _beside(law: StepLaw, usual: StepLaw) -> EngineCosts:
    prompts = law.per_prompt_token_s / usual.per_prompt_token_s
    steps = law.step_s(_SEQUENCES, 0) / usual.step_s(_SEQUENCES, 0)
    if all(1 / _NEARLY <= each <= _NEARLY for each in (prompts, steps)):
        return USUAL_COSTS
    return USUAL_COSTS.times(prompts, steps)


def _middle(values: Iterable[float]) -> float:
    return median_low(list(values))
