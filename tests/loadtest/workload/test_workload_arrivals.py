"""Arrivals: counts, rates and burstiness of every law, and what they depend on."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.workload.arrivals import RatePiece, instants, ramp, steady, steps, thin


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_constant_arrivals_are_constant() -> None:
    found = instants(steady(4.0, 10.0), 0.0, rng())

    assert found.tolist() == [number / 4 for number in range(40)]


@pytest.mark.parametrize("rate_per_s", [0.1, 0.3, 3.0, 7.0, 1 / 3])
def test_constant_arrivals_are_as_many_as_the_rate_says(rate_per_s: float) -> None:
    assert len(instants(steady(rate_per_s, 30.0), 0.0, rng())) == round(rate_per_s * 30)


# A sample's coefficient of variation is itself the less certain the burstier the law.
@pytest.mark.parametrize(("cv", "within"), [(0.3, 0.02), (1.0, 0.02), (2.0, 0.04), (6.0, 0.12)])
def test_gaps_have_the_wanted_mean_and_variation(cv: float, within: float) -> None:
    found = instants(steady(50.0, 2000.0), cv, rng())
    gaps_s = np.diff(found)

    assert gaps_s.mean() == pytest.approx(1 / 50, rel=within)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=within)


def test_bursty_arrivals_are_as_many_as_the_rate_says_even_in_short_runs() -> None:
    counts = [len(instants(steady(5.0, 10.0), 4.0, rng(seed))) for seed in range(4000)]

    # Standard error 0.5; a process that began with an arrival would have 7.5 more.
    assert np.mean(counts) == pytest.approx(50, abs=1.6)


def test_a_ramp_has_its_rate_at_every_time() -> None:
    pieces = ramp([(100.0, 0.0), (300.0, 200.0), (400.0, 0.0)], 500.0)
    found = instants(pieces, 1.0, rng())
    counts, _ = np.histogram(found, bins=[0, 100, 200, 300, 400, 500])

    expected = np.array([0, 5000, 15000, 10000, 0])
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()
    # Within a rising stretch from 0, a quarter comes in the first half.
    early = ((found >= 100) & (found < 150)).sum()
    assert early == pytest.approx(1250, abs=4 * 1250**0.5)


def test_an_even_ramp_lies_exactly_where_the_area_says() -> None:
    found = instants(ramp([(0.0, 0.0), (10.0, 10.0)], 10.0), 0.0, rng())

    # The area under the ramp is t * t / 2.
    assert found == pytest.approx([(2 * number) ** 0.5 for number in range(50)])


def test_a_ramp_holds_its_ends() -> None:
    pieces = ramp([(10.0, 2.0), (20.0, 4.0)], 30.0)

    assert pieces == (
        RatePiece(0.0, 10.0, 2.0, 2.0),
        RatePiece(10.0, 20.0, 2.0, 4.0),
        RatePiece(20.0, 30.0, 4.0, 4.0),
    )


def test_a_ramp_is_cut_where_the_run_ends() -> None:
    assert ramp([(0.0, 0.0), (100.0, 50.0)], 10.0) == (RatePiece(0.0, 10.0, 0.0, 5.0),)


def test_steps_jump_and_the_last_one_holds() -> None:
    found = instants(steps([(0.0, 1.0), (10.0, 0.0), (20.0, 2.0)], 25.0), 0.0, rng())

    assert found.tolist() == [*range(10), *(20 + number / 2 for number in range(10))]


@example(rates=[0.55, 12.0625], cv=3.0, seed=33, longer_s=1.0)  # rounding
@given(
    rates=st.lists(st.floats(0, 20), min_size=2, max_size=5),
    cv=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 100),
    longer_s=st.floats(1, 100),
)
def test_arrivals_ascend_within_the_run_and_a_longer_run_begins_with_a_shorter(
    rates: list[float], cv: float, seed: int, longer_s: float
) -> None:
    points = [(10.0 * number, rate) for number, rate in enumerate(rates)]
    duration_s = 10.0 * (len(rates) - 1)
    found = instants(ramp(points, duration_s), cv, rng(seed))
    longer = instants(ramp(points, duration_s + longer_s), cv, rng(seed))

    assert (np.diff(found) >= 0).all()
    assert ((found >= 0) & (found <= duration_s)).all()
    assert longer[: len(found)] == pytest.approx(found)


def test_arrivals_depend_on_the_seed_alone() -> None:
    def found(seed: int) -> list[float]:
        return list(instants(steady(5.0, 10.0), 1.0, rng(seed)))

    assert found(3) == found(3) != found(4)


def test_thinning_keeps_the_wanted_share() -> None:
    assert thin(100_000, 0.3, rng()).mean() == pytest.approx(0.3, abs=0.006)
