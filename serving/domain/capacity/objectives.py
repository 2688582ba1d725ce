"""The objectives of a request: the one definition for policies, gateways, load tests and alerts.

A prompt takes time to compute, so that one bound for all lengths is out of reach of long prompts or
says nothing of short ones. The time to first token that is allowed grows with the prompt:

    ttft = ttft_s + ttft_per_prompt_token_s * prompt tokens, those in a prefix cache included

The part per token is a promise and not a fit: it is at most twice what the profile says that an
engine alone takes for a token of a prompt. Pure.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from serving.domain.capacity.slice_profile import CapacityProfile

# More than this of the engine's own time for a prompt token would allow for anything.
MOST_OF_PROFILE = 2.0

_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]


def ttft_limit_s(ttft_s: float, ttft_per_prompt_token_s: float, prompt_tokens: float) -> float:
    """Returns the longest time to first token of a prompt of so many tokens, in seconds."""
    return ttft_s + ttft_per_prompt_token_s * prompt_tokens


@dataclass(frozen=True, slots=True)
class Objectives:
    """The objectives of a request, in seconds: TTFT from its arrival, and TPOT.

    `ttft_per_prompt_token_s` comes on top of `ttft_s` for each token of the prompt.
    """

    ttft_s: float
    tpot_s: float
    ttft_per_prompt_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: above 0")
        if self.ttft_per_prompt_token_s < 0:
            raise ValueError(
                f"ttft_per_prompt_token_s is {self.ttft_per_prompt_token_s!r}; allowed: 0 or more"
            )

    def ttft_of(self, prompt_tokens: float) -> float:
        """Returns the longest time to first token of a prompt of so many tokens, in seconds."""
        return ttft_limit_s(self.ttft_s, self.ttft_per_prompt_token_s, prompt_tokens)

    @property
    def ttft_words(self) -> str:
        """The objective of the first token, for a reader."""
        if not self.ttft_per_prompt_token_s:
            return f"{self.ttft_s:g} s"
        return f"{self.ttft_s:g} s + {1e3 * self.ttft_per_prompt_token_s:g} s per 1,000 tokens"

    def check(self, profile: CapacityProfile) -> None:
        """Checks the part per prompt token against a profile.

        Raises:
            ValueError: it is more than twice what the profile's engine takes for a prompt token.
        """
        most = MOST_OF_PROFILE * profile.per_prompt_token_s
        if self.ttft_per_prompt_token_s > most:
            raise ValueError(
                f"objectives.ttft_per_prompt_token_s is {self.ttft_per_prompt_token_s:g};"
                f" allowed: at most {most:g}, {MOST_OF_PROFILE:g} times the profile's"
                " per_prompt_token_s"
            )


class ObjectivesConfig(BaseModel):
    """The objectives of a request, in seconds."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    ttft_s: _Positive
    """Time to first token, from its arrival."""
    tpot_s: _Positive
    """Time per output token after the first, on average."""
    ttft_per_prompt_token_s: _NotNegative = 0.0
    """On top of `ttft_s`, for each token of the prompt."""

    @property
    def objectives(self) -> Objectives:
        """The objectives that it sets."""
        return Objectives(self.ttft_s, self.tpot_s, self.ttft_per_prompt_token_s)


# Of a model of which nobody says any.
DEFAULT_OBJECTIVES = Objectives(ttft_s=2.5, tpot_s=0.1)
