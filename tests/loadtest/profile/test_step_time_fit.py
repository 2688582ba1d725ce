"""The fit finds the law that made the observations, or says that it cannot."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.profile.step_time_fit import SteadyState, StepTimeFit, UnfitError, fit_step_time

LOADS = [(1, 0), (8, 0), (64, 0), (1, 2000), (16, 4000), (64, 1000)]


def observed(law: StepTimeFit, loads: list[tuple[float, float]]) -> list[SteadyState]:
    return [SteadyState(n, tokens, law.step_s(n, tokens)) for n, tokens in loads]


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-3), st.floats(1e-6, 1e-4))
def test_law_is_found_again(base_s: float, per_sequence_s: float, per_token_s: float) -> None:
    law = StepTimeFit(base_s, per_sequence_s, per_token_s, 0.0)
    found = fit_step_time(observed(law, LOADS))
    assert found.base_s == pytest.approx(base_s, rel=1e-3)
    assert found.per_sequence_s == pytest.approx(per_sequence_s, rel=1e-3)
    assert found.per_prompt_token_s == pytest.approx(per_token_s, rel=1e-3)
    assert found.worst_error < 1e-6


def test_noise_of_five_per_cent_moves_the_prediction_little() -> None:
    chance = random.Random(7)
    law = StepTimeFit(0.02, 0.0002, 5e-5, 0.0)
    noisy = [
        SteadyState(o.running, o.prompt_tokens_per_s, o.step_s * chance.gauss(1, 0.05))
        for o in observed(law, LOADS * 4)
    ]
    found = fit_step_time(noisy)
    assert found.step_s(32, 2000) == pytest.approx(law.step_s(32, 2000), rel=0.05)
    assert found.worst_error > 0.01


def test_no_coefficient_is_negative() -> None:
    falling = [SteadyState(1, 0, 0.02), SteadyState(8, 500, 0.019), SteadyState(64, 0, 0.018)]
    found = fit_step_time([*falling, SteadyState(4, 3000, 0.0185)])
    assert min(found.base_s, found.per_sequence_s, found.per_prompt_token_s) >= 0


@pytest.mark.parametrize(
    "loads", [[(1, 0), (2, 0)], [(4, 100)] * 6, [(1, 0), (8, 0), (64, 0)]], ids=str
)
def test_observations_that_do_not_tell_are_refused(loads: list[tuple[float, float]]) -> None:
    with pytest.raises(UnfitError):
        fit_step_time(observed(StepTimeFit(0.02, 0.0002, 5e-5, 0.0), loads))
