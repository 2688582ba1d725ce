"""How long an engine's steps take, by what is in them. Pure.

It is the law of `slice_profile` with numbers of one engine's own, as it has seen them in its steps.
"""

from typing import NamedTuple


class StepLaw(NamedTuple):
    """A step takes `base_s`, and more for each sequence and each prompt token in it; in seconds."""

    base_s: float
    per_sequence_s: float
    per_prompt_token_s: float

    def step_s(self, num_sequences: float, prompt_tokens: float) -> float:
        """Returns how long a step takes."""
        return (
            self.base_s
            + self.per_sequence_s * num_sequences
            + self.per_prompt_token_s * prompt_tokens
        )


# Of an engine that has told none, as far as the parts go beside each other: a chip's that computes
# 20,000 tokens of prompts a second, in steps of 12 ms and 0.2 ms more for each sequence.
USUAL_LAW = StepLaw(0.012, 0.0002, 0.00005)
