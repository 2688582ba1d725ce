"""The law of steps is fitted to what engines show below saturation, and not beyond it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import PROFILE

from autoscaling.policy.capacity.refitted_law import LawFit
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile

PLANNED_S = 0.05
LOOK_S = 10.0
# Input and output tokens of a request.
TOKENS = (200.0, 200.0)


def law(base: float, work: float) -> CapacityProfile:
    """The profile with so many times its base time and its work."""
    return PROFILE.model_copy(
        update={
            "base_s": base * PROFILE.base_s,
            "per_sequence_s": work * PROFILE.per_sequence_s,
            "per_prompt_token_s": work * PROFILE.per_prompt_token_s,
        }
    )


def engine(real: CapacityProfile, running: float, times: float = 1.0) -> EngineRate:
    """An engine by a law, with so many sequences and as many prompt tokens in each step."""
    step_s = times * (real.base_s + running * (real.per_sequence_s + real.per_prompt_token_s))
    return EngineRate("e", "spot", running / step_s, running / step_s, step_s)


def fit_of(
    real: CapacityProfile, loads: tuple[float, ...], noise: float = 0.0, hours: float = 2.0
) -> LawFit:
    """The fit after hours of looks at engines with these loads, each look with its noise."""
    chance, fit = random.Random(1), LawFit()
    for _ in range(int(hours * 3600 / LOOK_S)):
        rates = [engine(real, load, chance.gauss(1, noise)) for load in loads]
        fit = fit.seen(LOOK_S, rates, PROFILE)
    return fit


def factor(fit: LawFit) -> float:
    """How many times as much as by the profile's law a slice carries by the fitted one."""
    fitted = fit.law(PROFILE, PLANNED_S)
    return fitted.max_requests_per_s(*TOKENS, PLANNED_S) / by_law(PROFILE)


def by_law(profile: CapacityProfile) -> float:
    return profile.max_requests_per_s(*TOKENS, PLANNED_S)


@given(base=st.floats(0.6, 1.4), work=st.floats(0.5, 1.6))
@settings(max_examples=30, deadline=None)
def test_law_is_found_where_loads_differ(base: float, work: float) -> None:
    real = law(base, work)
    found = factor(fit_of(real, (8.0, 14.0, 20.0)))
    true = by_law(real) / by_law(PROFILE)
    assert 0.95 * true <= found <= true


@pytest.mark.parametrize("work", [0.5, 1.0, 1.5])
def test_steps_that_scatter_do_not_promise_more_than_there_is(work: float) -> None:
    real = law(1.0, work)
    true = by_law(real) / by_law(PROFILE)
    found = factor(fit_of(real, (8.0, 14.0, 20.0), noise=0.03))
    assert 0.85 * true <= found <= 1.01 * true


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_one_load_does_not_tell_work_from_base(noise: float) -> None:
    """It promises no more than either would: quick steps at one load may be all of the base."""
    real = law(0.8, 1.0)
    found = factor(fit_of(real, (10.0,), noise))
    assert found <= by_law(real) / by_law(PROFILE)


def test_nothing_seen_promises_nothing() -> None:
    assert factor(LawFit()) < 1.0


def test_idle_engines_say_nothing() -> None:
    assert fit_of(law(1.0, 0.5), (3.0,)) == LawFit()


def test_one_quick_engine_of_four_teaches_nothing() -> None:
    fit = LawFit()
    for _ in range(700):
        rates = [engine(PROFILE, load) for load in (8.0, 14.0, 20.0)]
        fit = fit.seen(LOOK_S, [*rates, engine(law(0.5, 0.5), 14.0)], PROFILE)
    assert factor(fit) <= 1.0


def test_another_law_is_believed_after_some_hours() -> None:
    fit = fit_of(law(1.0, 0.5), (8.0, 14.0, 20.0))
    for _ in range(int(24 * 3600 / LOOK_S)):
        fit = fit.seen(LOOK_S, [engine(PROFILE, load) for load in (8.0, 14.0, 20.0)], PROFILE)
    assert factor(fit) == pytest.approx(1.0, abs=0.05)
