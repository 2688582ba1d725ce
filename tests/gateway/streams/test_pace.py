"""How long tokens wait, by the load of the loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.streams.pace import WINDOW_S, HoldBounds, HoldPace, ThreadTimes


def after(
    loads: list[float],
    least_s: float = 0.0,
    most_s: float = 0.1,
    window_s: float = WINDOW_S,
    waited_ratio: float = 0.0,
) -> float:
    """The hold after windows in which the loop's thread computed for these shares of a core."""
    pace = HoldPace(HoldBounds(least_s, most_s), 100.0, ThreadTimes(7.0, 3.0))
    now_s, computed_s, waited_s = 100.0, 7.0, 3.0
    for load in loads:
        now_s += window_s
        computed_s += load * window_s
        waited_s += waited_ratio * window_s
        assert pace.is_due(now_s)
        pace.look(now_s, ThreadTimes(computed_s, waited_s))
        assert not pace.is_due(now_s)
    return pace.hold_s


@pytest.mark.parametrize(
    ("load", "hold_s"), [(0.0, 0.0), (0.49, 0.0), (0.7, 0.05), (0.9, 0.1), (1.0, 0.1)]
)
def test_nothing_waits_below_half_of_a_core_and_the_bound_is_reached_near_a_whole_one(
    load: float, hold_s: float
) -> None:
    assert after([load]) == pytest.approx(hold_s)


@pytest.mark.parametrize(
    ("load", "waited_ratio", "hold_s"),
    [(0.45, 0.5, 0.1), (0.1, 0.5, 0.0), (0.35, 0.5, 0.05), (0.0, 1.0, 0.0), (0.2, 0.8, 0.1)],
)
def test_thread_that_waits_for_a_core_is_as_busy_as_what_it_gets_of_one(
    load: float, waited_ratio: float, hold_s: float
) -> None:
    assert after([load], waited_ratio=waited_ratio) == pytest.approx(hold_s)


def test_hold_follows_a_rise_at_once_and_a_fall_by_and_by() -> None:
    falling = [after([1.0, *[0.0] * num_windows]) for num_windows in range(40)]
    assert falling[0] == pytest.approx(0.1)
    assert falling[1] == pytest.approx(0.03)
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == 0.0


def test_shortest_time_is_kept_in_an_idle_gateway() -> None:
    assert after([], least_s=0.1, most_s=0.1) == 0.1
    assert after([0.0] * 5, least_s=0.03) == 0.03
    assert after([1.0], least_s=0.03) == pytest.approx(0.1)


def test_nothing_waits_if_nothing_may() -> None:
    assert after([1.0] * 5, most_s=0.0) == 0.0


@given(
    st.lists(st.floats(0, 1.5), max_size=20),
    st.floats(0, 0.1),
    st.floats(0, 0.9),
    st.floats(WINDOW_S, 60),
    st.floats(0, 1.5),
)
def test_hold_stays_within_its_bounds(
    loads: list[float], least_s: float, more_s: float, window_s: float, waited_ratio: float
) -> None:
    hold_s = after(loads, least_s, least_s + more_s, window_s, waited_ratio)
    assert least_s <= hold_s <= least_s + more_s
