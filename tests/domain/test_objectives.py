"""One definition of the objectives: what a prompt of some length is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.domain.capacity.objectives import (
    MOST_OF_PROFILE,
    Objectives,
    ObjectivesConfig,
    ttft_limit_s,
)
from serving.domain.capacity.slice_profile import CapacityProfile

PROFILE = CapacityProfile(
    model="m",
    engine="paced",
    base_s=0.02,
    per_sequence_s=0.001,
    per_prompt_token_s=1e-4,
    max_num_seqs=64,
    measured_on="2026-11-26",
    source="made up",
)
SECONDS = st.floats(1e-3, 1e3)
PER_TOKEN = st.floats(0, 1e-2)
TOKENS = st.integers(0, 1_000_000)


@given(SECONDS, PER_TOKEN, TOKENS, TOKENS)
def test_longer_prompt_is_never_allowed_less(
    ttft_s: float, per_token_s: float, tokens: int, more: int
) -> None:
    objectives = Objectives(ttft_s, 0.1, per_token_s)
    assert ttft_s <= objectives.ttft_of(tokens) <= objectives.ttft_of(tokens + more)
    assert objectives.ttft_of(tokens) == ttft_limit_s(ttft_s, per_token_s, tokens)


@given(SECONDS, TOKENS)
def test_flat_objective_is_the_same_for_all_prompts(ttft_s: float, tokens: int) -> None:
    assert Objectives(ttft_s, 0.1).ttft_of(tokens) == ttft_s


def test_part_per_token_is_at_most_twice_what_the_engine_takes() -> None:
    most = MOST_OF_PROFILE * PROFILE.per_prompt_token_s
    Objectives(2.0, 0.1, most).check(PROFILE)
    message = r"objectives.ttft_per_prompt_token_s is 0.00021; allowed: at most 0.0002, 2 times"
    with pytest.raises(ValueError, match=message):
        Objectives(2.0, 0.1, 1.05 * most).check(PROFILE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 0.1, 0.0), "ttft_s is 0.0; allowed: above 0"),
        ((2.0, -1.0, 0.0), "tpot_s is -1.0; allowed: above 0"),
        ((2.0, 0.1, -1e-3), "ttft_per_prompt_token_s is -0.001; allowed: 0 or more"),
    ],
)
def test_what_is_no_objective_is_refused(values: tuple[float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objectives(*values)


def test_configuration_is_strict_and_flat_where_nothing_is_said() -> None:
    assert ObjectivesConfig(ttft_s=2.0, tpot_s=0.1).objectives == Objectives(2.0, 0.1)
    config = ObjectivesConfig(ttft_s=2.0, tpot_s=0.1, ttft_per_prompt_token_s=1e-4)
    assert config.objectives == Objectives(2.0, 0.1, 1e-4)
    with pytest.raises(ValidationError, match="ttft_per_token_s"):
        ObjectivesConfig.model_validate({"ttft_s": 2.0, "tpot_s": 0.1, "ttft_per_token_s": 1e-4})


def test_words_name_both_parts() -> None:
    assert Objectives(2.0, 0.1).ttft_words == "2 s"
    assert Objectives(2.0, 0.1, 2e-4).ttft_words == "2 s + 0.2 s per 1,000 tokens"
