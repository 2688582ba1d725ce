"""Laws of counts and waits: their percentiles, means and bounds."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workload.laws import (
    ExponentialWait,
    FixedCount,
    FixedWait,
    LognormalCount,
    LognormalWait,
    UniformCount,
)


def test_lognormal_counts_have_their_percentiles() -> None:
    law, rng = LognormalCount(p50=1020, p99=4142, max=100_000), random.Random(1)
    drawn = sorted(law.draw(rng) for _ in range(40_000))

    assert drawn[20_000] == pytest.approx(1020, rel=0.02)
    assert drawn[39_600] == pytest.approx(4142, rel=0.05)


@given(
    p50=st.floats(1, 1000), factor=st.floats(1.01, 100), room=st.integers(1, 50), seed=st.integers()
)
def test_lognormal_counts_stay_within_their_bounds(
    p50: float, factor: float, room: int, seed: int
) -> None:
    law = LognormalCount(p50=p50, p99=p50 * factor, max=int(p50) + room)

    assert 1 <= law.draw(random.Random(seed)) <= law.max


def test_what_is_beyond_the_maximum_is_not_heaped_on_it() -> None:
    law, rng = LognormalCount(p50=100, p99=10_000, max=200), random.Random(1)
    drawn = [law.draw(rng) for _ in range(10_000)]

    # A third of the whole law lies beyond 200.
    assert drawn.count(200) < 50


def test_uniform_counts_have_both_ends_and_all_between_equally_often() -> None:
    law, rng = UniformCount(min=3, max=6), random.Random(1)
    drawn = [law.draw(rng) for _ in range(8000)]

    assert {value: drawn.count(value) for value in sorted(set(drawn))} == pytest.approx(
        {3: 2000, 4: 2000, 5: 2000, 6: 2000}, abs=160
    )


def test_waits_have_their_means() -> None:
    rng = random.Random(1)
    exponential = [ExponentialWait(mean_s=3).draw(rng) for _ in range(20_000)]
    lognormal = [LognormalWait(p50_s=4, p99_s=30).draw(rng) for _ in range(20_000)]

    assert statistics.mean(exponential) == pytest.approx(3, rel=0.03)
    assert statistics.stdev(exponential) == pytest.approx(3, rel=0.05)
    assert statistics.median(lognormal) == pytest.approx(4, rel=0.03)
    assert sum(value > 30 for value in lognormal) == pytest.approx(200, abs=60)


def test_fixed_laws_are_fixed() -> None:
    rng = random.Random(1)

    assert FixedCount(value=7).draw(rng) == 7
    assert FixedWait(value_s=0.5).draw(rng) == 0.5
