"""The law of an engine's steps, as its steps show it."""

import random

import pytest

from serving.domain.capacity.step_law import USUAL_LAW, StepLaw
from serving.engine.stats import StatsCollector, StepCount
from serving.engine.step_law import StepLawFit

# Of a model on CPU: its parts stand to each other as no chip's do.
SLOW = StepLaw(0.02, 0.004, 0.0005)


def mixed_steps(
    fit: StepLawFit, law: StepLaw, num_steps: int, seed: int = 1, noise: float = 0.05
) -> None:
    """Steps with one to thirty sequences, in every twentieth a prompt, that scatter a little."""
    chance = random.Random(seed)
    sequences = 8.0
    for step in range(num_steps):
        sequences = min(30.0, max(1.0, sequences + chance.choice((-1.0, 0.0, 1.0))))
        prompt_tokens = chance.expovariate(1 / 800) if step % 20 == 0 else 0.0
        step_s = law.step_s(sequences, prompt_tokens) * chance.gauss(1.0, noise)
        fit.took(max(0.0, step_s), sequences, prompt_tokens)


def test_steps_of_a_mixed_load_show_all_three_parts() -> None:
    fit = StepLawFit()
    mixed_steps(fit, SLOW, 4000)
    assert fit.law is not None
    assert list(fit.law) == pytest.approx(list(SLOW), rel=0.15)


def test_what_a_few_steps_took_is_no_law() -> None:
    fit = StepLawFit()
    mixed_steps(fit, SLOW, 190)
    assert fit.law is None
    mixed_steps(fit, SLOW, 10)
    assert fit.law is not None


def test_load_that_never_changes_shows_the_pace_and_leaves_the_parts_as_usual() -> None:
    fit = StepLawFit()
    for _ in range(2000):
        fit.took(3 * USUAL_LAW.step_s(10, 20), 10, 20)
    assert fit.law is not None
    assert list(fit.law) == pytest.approx([3 * part for part in USUAL_LAW], rel=0.05)


def test_no_part_is_nothing_or_less() -> None:
    """The more sequences the shorter the step: no engine is so, but numbers may look like it."""
    fit = StepLawFit()
    for step in range(2000):
        sequences = 1 + step // 16 % 20
        fit.took(0.1 - 0.004 * sequences, sequences, 0.0)
    assert fit.law is not None
    assert all(part > 0 for part in fit.law)


def test_step_that_was_held_up_teaches_nothing() -> None:
    fit = StepLawFit()
    mixed_steps(fit, SLOW, 4000)
    before = fit.law
    for _ in range(8):
        for _ in range(7):
            fit.took(SLOW.step_s(8, 0), 8, 0)
        fit.took(30.0, 8, 0)  # a program was compiled
    assert fit.law == before
    # What goes on is no disturbance.
    for _ in range(80):
        fit.took(30.0, 8, 0)
    assert fit.law is not None
    assert fit.law.step_s(8, 0) > 0.1


def test_engine_that_has_become_slower_is_seen_to_be() -> None:
    fit = StepLawFit()
    mixed_steps(fit, SLOW, 4000)
    slower = StepLaw(*(5 * part for part in SLOW))
    mixed_steps(fit, slower, 30_000, seed=2)
    assert fit.law is not None
    assert list(fit.law) == pytest.approx(list(slower), rel=0.2)


def test_only_steps_whose_length_is_known_count() -> None:
    """A prompt that comes to an idle engine is in a step of which nobody knows the beginning."""
    meter = StatsCollector()
    at_s = 0.0
    for _ in range(200):
        meter.stepped(StepCount(1, computed_tokens=5000), at_s, goes_on=True)
        for _ in range(20):
            at_s += SLOW.step_s(4, 0)
            meter.stepped(StepCount(4), at_s, goes_on=True)
        at_s += SLOW.step_s(4, 0)
        meter.stepped(StepCount(4), at_s, goes_on=False)
        at_s += 60.0
    law = meter.stats().step_law
    assert law is not None
    assert law.step_s(4, 0) == pytest.approx(SLOW.step_s(4, 0), rel=0.02)
