"""Finds a good point of a grid that is too large to try all of it. Pure.

A few numbers of each axis are tried with each other, and then the neighbours of the best, ever
nearer, until none is better. That is right where what is ranked has one valley, and good where it
is a little rough, as numbers of whole slices make it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Point = tuple[int, ...]
# At the end all points so near are tried: of whole slices of three shapes the cheapest is often one
# more of one and one fewer of two. On more axes those would be too many.
_REACH, _FEW_AXES = 2, 3
# Ranks are compared, whatever they are made of.
_RankOf = Callable[[Point], Any]


def coarse_points(axes: Sequence[range], marks: Sequence[Sequence[int]], most: int) -> list[Point]:
    """Returns points all over the grid, about `most`, and those with the `marks` of each axis."""
    num_levels = max(3, int(most ** (1 / len(axes))))
    levels = [
        sorted({*_spread(axis, num_levels), *(each for each in of_axis if each in axis)})
        for axis, of_axis in zip(axes, marks, strict=True)
    ]
    return list(itertools.product(*levels))


def best_point(
    axes: Sequence[range], points: Sequence[Point], weights: Sequence[float], rank: _RankOf
) -> Point:
    """Returns the best point found from the best of `points` on; the least rank is best.

    Beside one step along an axis, a step along one is tried with one back along another that is as
    long by the `weights` of the axes; 0: there is no such step.
    """
    best = min(points, key=rank)
    best_rank = rank(best)
    steps = [max(1, len(axis) // 4) for axis in axes]
    while True:
        neighbours = list(_neighbours(best, axes, steps, weights))
        nearest = min(neighbours, key=rank, default=best)
        if rank(nearest) < best_rank:
            best, best_rank = nearest, rank(nearest)
        elif max(steps) > 1:
            steps = [max(1, step // 2) for step in steps]
        else:
            around = min(_around(best, axes), key=rank)
            if not rank(around) < best_rank:
                return best
            best, best_rank = around, rank(around)


def _around(point: Point, axes: Sequence[range]) -> Iterator[Point]:
    """Returns all points that are near on every axis."""
    reach = _REACH if len(axes) <= _FEW_AXES else 1
    near = (
        range(max(at - reach, axis[0]), min(at + reach, axis[-1]) + 1)
        for at, axis in zip(point, axes, strict=True)
    )
    return itertools.product(*near)


def _spread(axis: range, count: int) -> list[int]:
    last = len(axis) - 1
    return [axis[round(last * place / (count - 1))] for place in range(count)]


def _neighbours(
    point: Point, axes: Sequence[range], steps: Sequence[int], weights: Sequence[float]
) -> Iterator[Point]:
    moves: list[dict[int, int]] = []
    for place, step in enumerate(steps):
        moves += [{place: step}, {place: -step}]
        for other, weight in enumerate(weights):
            if other != place and weight and weights[place]:
                moves.append({place: step, other: -max(1, round(step * weights[place] / weight))})
    for move in moves:
        moved = tuple(
            min(max(at + move.get(place, 0), axis[0]), axis[-1])
            for place, (at, axis) in enumerate(zip(point, axes, strict=True))
        )
        if moved != point:
            yield moved
