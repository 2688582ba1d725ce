"""What the figures of several pairs come to."""

import random

import pytest

from benchmarks.side_by_side.spread import spread_of


def test_spread_has_median_and_range() -> None:
    spread = spread_of([3.0, 1.0, 2.0])
    assert spread is not None
    assert (spread.low, spread.median, spread.high) == (1.0, 2.0, 3.0)


def test_no_values_have_no_spread() -> None:
    assert spread_of([]) is None


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        # 2 / 2^5 is more than 5 %, 2 / 2^6 is less; the ranks for 15 are in every table of them.
        (5, None),
        (6, (1.0, 6.0)),
        (15, (4.0, 12.0)),
    ],
)
def test_interval_is_that_of_order_statistics(
    count: int, expected: tuple[float, float] | None
) -> None:
    spread = spread_of([float(number) for number in range(count, 0, -1)])
    assert spread is not None
    assert spread.interval == expected


def test_interval_has_the_true_median_as_often_as_it_says() -> None:
    chance = random.Random(1)
    hits = 0
    for _ in range(2000):
        spread = spread_of([chance.expovariate(1.0) for _ in range(15)])
        assert spread is not None
        assert spread.interval is not None
        hits += spread.interval[0] <= 0.6931 <= spread.interval[1]
    assert 0.95 <= hits / 2000 <= 0.98
