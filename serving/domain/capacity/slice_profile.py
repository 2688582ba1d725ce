"""The capacity model: the load that one slice can carry at an objective, and its file.

The law is that of continuous batching. One engine step gives every running sequence one token and
computes some prompt tokens on the side; it takes

    step_s = base_s + per_sequence_s * running + per_prompt_token_s * prompt_tokens_in_it

At `r` requests per second with `i` prompt and `o` output tokens each, a step holds `r * o * step_s`
sequences and `r * i * step_s` prompt tokens, hence

    work_s = o * per_sequence_s + i * per_prompt_token_s
    step_s = base_s / (1 - r * work_s)
    r_max  = (1 - base_s / tpot_s) / work_s    where steps are as long as the TPOT objective allows

unless sequences run out first: running <= max_num_seqs bounds r by max_num_seqs / (o * step_s); or
the tokens of a step: r * (i + o) * step_s <= max_num_batched_tokens.
`slicewise profile` measures the three coefficients; the simulator's engines obey the same law.
"""

import math
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Of a request, where nothing else is known and none has been measured.
ASSUMED_INPUT_TOKENS, ASSUMED_OUTPUT_TOKENS = 512, 256


class ProfileError(ValueError):
    """The profile file cannot be used. The message names the field and what is allowed."""


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CapacityProfile(BaseModel):
    """The measurements of one slice shape with one model on one engine. Times are in seconds.

    An engine over a multislice is measured whole. So are engines that share a slice: by this law
    they are one engine with a part of the time for each sequence and prompt token.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    model: Annotated[str, Field(min_length=1)]
    """The model, as it is served."""
    engine: Annotated[str, Field(min_length=1)]
    """What ran it; `paced` for a fake."""
    generation: str | None = None
    """Generation of its chips; needed for list prices and for quotas."""
    topology: str | None = None
    """Its slice, such as `2x4`; likewise."""
    num_slices: Annotated[int, Field(ge=1, le=16)] = 1
    """Slices of each engine: all of them are then counted, bought and priced as one."""
    num_engines: Annotated[int, Field(ge=1, le=256)] = 1
    """Engines on a slice."""
    base_s: _Positive
    """What each step takes, in seconds."""
    per_sequence_s: _NotNegative
    """What it takes more for each running sequence."""
    per_prompt_token_s: _NotNegative
    """What it takes more for each token of prompts in it."""
    max_num_seqs: Annotated[int, Field(ge=1)]
    """Sequences that run at once, at most."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens in a step, at most."""
    ttft_floor_s: _NotNegative = 0.0
    """Time to the first token of a request alone, beyond the computing of its prompt."""
    load_s: _NotNegative = 0.0
    """Time from a reserved slice until its engine is ready."""
    measured_on: str
    """Date, as YYYY-MM-DD."""
    source: Annotated[str, Field(min_length=1)]
    """What was measured, where, and when."""

    def of_slice(self, num_engines: int) -> "CapacityProfile":
        """Returns the profile of a slice that `num_engines` share, each as this one."""
        return self.model_copy(
            update={
                "num_engines": num_engines,
                "per_sequence_s": self.per_sequence_s / num_engines,
                "per_prompt_token_s": self.per_prompt_token_s / num_engines,
                "max_num_seqs": self.max_num_seqs * num_engines,
            }
        )

    def work_s(self, input_tokens: float, output_tokens: float) -> float:
        """Returns the engine time that one more request costs, without the steps' base time."""
        return output_tokens * self.per_sequence_s + input_tokens * self.per_prompt_token_s

    def step_s(self, requests_per_s: float, input_tokens: float, output_tokens: float) -> float:
        """Returns the length of a step in steady state; infinite at and beyond saturation."""
        share = requests_per_s * self.work_s(input_tokens, output_tokens)
        return self.base_s / (1 - share) if share < 1 else math.inf

    def max_requests_per_s(self, input_tokens: float, output_tokens: float, tpot_s: float) -> float:
        """Returns the rate that a slice carries in steady state with steps up to `tpot_s`.

        It is 0 when even an idle engine's step is longer, and infinite only for requests that cost
        nothing.
        """
        if tpot_s <= self.base_s:
            return 0.0
        work_s = self.work_s(input_tokens, output_tokens)
        by_time = (1 - self.base_s / tpot_s) / work_s if work_s > 0 else math.inf
        # running = r * o * step(r) <= max_num_seqs, solved for r, and the same of all tokens.
        by_sequences = self._rate_with(self.max_num_seqs, output_tokens, work_s)
        tokens = self.max_num_batched_tokens * self.num_engines
        by_tokens = self._rate_with(tokens, input_tokens + output_tokens, work_s)
        return min(by_time, by_sequences, by_tokens)

    def _rate_with(self, most_in_step: int, of_request: float, work_s: float) -> float:
        """Returns the rate at which steps have so many of what a request brings so many of."""
        if of_request <= 0:
            return math.inf
        return most_in_step / (of_request * self.base_s + most_in_step * work_s)


def read_profile(path: Path) -> CapacityProfile:
    """Returns the profile in a YAML file.

    Raises:
        ProfileError: the file cannot be read, or fields are wrong; the message lists them all.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return CapacityProfile.model_validate(raw)
    except (OSError, yaml.YAMLError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'file'} is {each['input']!r}: {each['msg']}"
            for each in error.errors()
        )
        raise ProfileError(f"{path}: {problems}") from error


def write_profile(profile: CapacityProfile, path: Path) -> None:
    """Writes the profile as YAML, in the order of the fields."""
    path.write_text(yaml.safe_dump(profile.model_dump(), sort_keys=False), encoding="utf-8")


def full_batch_tokens_per_s(base_s: float, per_sequence_s: float, max_num_seqs: int) -> float:
    """Returns what an engine emits at most by the law: every sequence a token in each step.

    It is infinite for steps that take no time.
    """
    step_s = base_s + per_sequence_s * max_num_seqs
    return max_num_seqs / step_s if step_s > 0 else math.inf
