"""What work takes on each engine beside the others, by the laws of their steps. Pure.

The unit is a 64th of the time in which the usual engine computes a token of a prompt, so that all
costs are whole numbers. Laws are measured, and those of equal engines differ a little: what lies
within a quarter of the usual one counts as usual, so that equal engines stay equal.
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

    @classmethod
    def of(cls, law: StepLaw, token_s: float) -> "EngineCosts":
        """Returns the costs by `law`, where the usual engine computes a token in `token_s`."""
        unit_s = token_s / UNITS_PER_TOKEN
        token, step, sequence = (
            round(part_s / unit_s)
            for part_s in (law.per_prompt_token_s, law.base_s, law.per_sequence_s)
        )
        return cls(max(1, token), step, sequence)


USUAL_COSTS = EngineCosts.of(USUAL_LAW, USUAL_LAW.per_prompt_token_s)


def costs_of(laws: Mapping[str, StepLaw | None]) -> dict[str, EngineCosts]:
    """Returns the costs of engines by id. One that has told no law is taken to be as usual."""
    known = [law for law in laws.values() if law is not None]
    if not known:
        return dict.fromkeys(laws, USUAL_COSTS)
    usual = StepLaw(*(_middle(each) for each in zip(*known, strict=True)))
    token_s = usual.per_prompt_token_s
    as_usual = EngineCosts.of(usual, token_s)
    return {
        engine_id: as_usual
        if law is None or _is_nearly(law, usual)
        else EngineCosts.of(law, token_s)
        for engine_id, law in laws.items()
    }


def _middle(values: Iterable[float]) -> float:
    return median_low(list(values))


def _is_nearly(law: StepLaw, usual: StepLaw) -> bool:
    ratios = (
        law.step_s(_SEQUENCES, 0) / usual.step_s(_SEQUENCES, 0),
        law.per_prompt_token_s / usual.per_prompt_token_s,
    )
    return all(1 / _NEARLY <= each <= _NEARLY for each in ratios)
