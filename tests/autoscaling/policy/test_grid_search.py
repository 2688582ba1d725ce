"""A good point of a large grid is found with a few hundred tried."""

from hypothesis import example, given
from hypothesis import strategies as st

from autoscaling.policy.mix.grid_search import Point, best_point, coarse_points

FEW = 800


@example([0, 99, 40, 7], 100)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.integers(1, 100))
def test_lowest_point_of_one_valley_is_found_among_few(lowest: list[int], most: int) -> None:
    axes = [range(100) for _ in lowest]
    tried: set[Point] = set()

    def rank(point: Point) -> float:
        tried.add(point)
        return sum(abs(at - low) for at, low in zip(point, lowest, strict=True))

    points = coarse_points(axes, [() for _ in axes], most)
    assert best_point(axes, points, [1.0 for _ in axes], rank) == tuple(lowest)
    assert len(tried) <= FEW


def test_step_from_one_axis_to_another_finds_what_costs_the_same_room() -> None:
    """Along either axis alone it is worse: what is covered is to stay as it is."""
    axes, weights = [range(31), range(16)], [2.0, 4.0]

    def rank(point: Point) -> tuple[float, float]:
        covered = sum(at * weight for at, weight in zip(point, weights, strict=True))
        return abs(covered - 60), point[0] * 1.0 + point[1] * 1.5

    assert best_point(axes, [(30, 0)], weights, rank) == (0, 15)


def test_first_points_are_the_ends_some_between_and_what_is_there() -> None:
    points = coarse_points([range(5, 106), range(3)], [(17, 400), ()], 9)
    assert {point[0] for point in points} == {5, 17, 55, 105}
    assert {point[1] for point in points} == {0, 1, 2}
    assert len(points) == 12
