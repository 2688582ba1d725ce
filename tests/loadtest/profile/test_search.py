"""The search for the highest rate, on servers whose knee is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.profile.search import Search, Trial, highest_passed, next_rate, wilson


def searched(search: Search, knee_per_s: float) -> tuple[Trial | None, list[Trial]]:
    """Every request is good below the knee, one in ten above."""
    trials: list[Trial] = []
    while (rate := next_rate(search, trials)) is not None:
        good = 1000 if rate <= knee_per_s else 100
        trials.append(Trial(rate, good, 1000))
    return highest_passed(search, trials), trials


@given(st.floats(0.05, 500), st.floats(0.5, 50))
def test_knee_is_found_within_the_tolerance(knee_per_s: float, first_per_s: float) -> None:
    search = Search(first_per_s, tolerance=0.05, max_trials=40)
    found, trials = searched(search, knee_per_s)
    assert found is not None
    assert knee_per_s / 1.051 <= found.requests_per_s <= knee_per_s
    assert len(trials) < 25


def test_search_gives_up_after_its_trials() -> None:
    found, trials = searched(Search(100.0, max_trials=3), 0.001)
    assert (found, len(trials)) == (None, 3)


def test_luck_above_a_failure_does_not_count() -> None:
    search = Search(1.0)
    trials = [Trial(1.0, 100, 100), Trial(2.0, 50, 100), Trial(4.0, 100, 100)]
    found = highest_passed(search, trials)
    assert found is not None
    assert found.requests_per_s == 1.0


def test_invalid_trial_bounds_the_search_from_above() -> None:
    search = Search(8.0, tolerance=0.5)
    trials = [Trial(8.0, 100, 100), Trial(16.0, 100, 100, is_valid=False)]
    rate = next_rate(search, trials)
    assert rate is not None
    assert 8 < rate < 16


@pytest.mark.parametrize(
    ("good", "total", "passes"),
    [(99, 100, True), (98, 100, True), (930, 1000, False), (0, 0, False), (5, 10, False)],
)
def test_as_many_misses_as_chance_explains_are_forgiven(
    good: int, total: int, passes: bool
) -> None:
    assert Trial(1.0, good, total).passes(0.99) is passes


def test_interval_as_published() -> None:
    # Wilson's interval for 8 of 10, e.g. Newcombe 1998, method 3.
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)


@pytest.mark.parametrize("field", ["first_per_s", "share", "tolerance"])
def test_senseless_search_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Search(**({"first_per_s": 1.0} | {field: 0.0}))
