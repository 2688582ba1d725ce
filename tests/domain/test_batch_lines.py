"""As many lines at once as steps have room for, or as it takes to be in time where none knows."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.capacity.batch_lines import (
    SEEN_FOR_S,
    EnginePace,
    LineRoom,
    LinesLeft,
    LineTuner,
    few_wait,
    lines_by_pace,
    lines_in_time,
    mean_step,
)

HOUR_S = 3600.0


def wanted(left: LinesLeft, now: int = 64, *, has_room: bool = True) -> int:
    return lines_in_time(now, 64, 500, left, has_room=has_room)


@pytest.mark.parametrize(
    ("left", "num_lines"),
    [
        # 10,000 lines of 2 s in an hour are 5.6 at once.
        (LinesLeft(10_000, HOUR_S, 2.0), 64),
        # 100,000 lines of 3 s are 83 at once, and a fifth more.
        (LinesLeft(100_000, HOUR_S, 3.0), 100),
        # Never more than twice as many at once as there were.
        (LinesLeft(100_000, 60.0, 3.0), 128),
        # Too late is as soon as can be.
        (LinesLeft(1000, -5.0, 3.0), 128),
        # Nothing is known yet, and nothing is left.
        (LinesLeft(100_000, 60.0, None), 64),
        (LinesLeft(0, HOUR_S, 3.0), 64),
    ],
)
def test_lines_at_once_are_those_that_it_takes(left: LinesLeft, num_lines: int) -> None:
    assert wanted(left) == num_lines


def test_lines_that_wait_are_not_made_more_and_those_that_are_too_many_go() -> None:
    late = LinesLeft(100_000, 60.0, 3.0)
    assert wanted(late, has_room=False) == 64
    assert wanted(late, now=300, has_room=False) == 300
    assert wanted(late, now=400) == 500
    assert wanted(LinesLeft(100_000, HOUR_S, 3.0), now=400, has_room=False) == 100
    assert lines_in_time(64, 64, 0, late, has_room=True) == 64


def test_steps_of_engines_count_by_their_sequences() -> None:
    assert mean_step([(3, 0.02), (1, 0.06), (0, 9.0)]) == pytest.approx((4, 0.03))
    assert mean_step([(0, 0.02)]) is None
    assert mean_step([]) is None


def test_lines_have_room_while_one_of_ten_waits() -> None:
    assert few_wait(6, 64)
    assert not few_wait(7, 64)


def test_others_that_miss_their_objectives_halve_the_lines_until_they_do_not() -> None:
    late, is_pressed = LinesLeft(100_000, 60.0, 3.0), True
    tuner = LineTuner(LineRoom(lambda: 500, lambda: True, lambda: is_pressed), 64)

    def lines(now_s: float, num_now: int) -> int:
        return tuner.lines(now_s, num_now, late, ("chat",), is_refused=False)

    assert lines(0.0, 64) == 32
    # What is told then is of before.
    assert lines(SEEN_FOR_S - 1, 32) == 32
    assert lines(SEEN_FOR_S, 32) == 16
    assert lines(2 * SEEN_FOR_S, 1) == 1
    is_pressed = False
    assert lines(3 * SEEN_FOR_S - 1, 1) == 1
    assert lines(3 * SEEN_FOR_S, 1) == 2
    assert lines(3 * SEEN_FOR_S + 1, 2) == 4


@dataclass
class Steps:
    """Engines by the law: a step takes `base_s`, and `each_s` for every sequence of an engine."""

    num_engines: int
    num_others: int
    base_s: float = 0.03
    each_s: float = 0.0005
    most_s: float = 0.085

    def pace(self, num_lines: int) -> EnginePace:
        num_all = self.num_others + num_lines
        step_s = self.base_s + self.each_s * num_all / self.num_engines
        return EnginePace(num_all, step_s, self.most_s)

    @property
    def most_lines(self) -> int:
        """The lines with which steps take as long as they may."""
        return int((self.most_s - self.base_s) / self.each_s * self.num_engines) - self.num_others


@given(
    st.integers(1, 50),
    st.integers(0, 100),
    st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_lines_take_the_room_that_steps_have_and_no_more(
    num_engines: int, others_each: int, later_each: list[int], num_batches: int
) -> None:
    """Also where several batches look at the same steps, and others' requests come and go."""
    steps = Steps(num_engines, others_each * num_engines)
    asked = [64] * num_batches
    for each in (others_each, *later_each):
        steps.num_others = each * num_engines
        for _ in range(400):
            pace = steps.pace(sum(asked))
            asked = [
                lines_by_pace(now, 64, 1 << 20, pace.room // num_batches, has_room=True)
                for now in asked
            ]
        # One line a batch is asked in any case. What is left of the room is rounded away.
        slack = 0.02 * num_engines * 110 + 25 * num_batches
        assert sum(asked) <= max(steps.most_lines, 0) + num_batches
        assert sum(asked) >= min(steps.most_lines - slack, 1 << 20)


def test_lines_come_slowly_and_go_at_once() -> None:
    quick, slow = EnginePace(1000, 0.05, 0.1), EnginePace(1000, 0.2, 0.1)
    assert lines_by_pace(64, 64, 5000, quick.room, has_room=True) == 128  # twice as many at most
    assert lines_by_pace(800, 64, 5000, quick.room, has_room=True) == 900
    assert lines_by_pace(800, 64, 850, quick.room, has_room=True) == 850
    assert lines_by_pace(800, 64, 5000, quick.room, has_room=False) == 800
    assert lines_by_pace(800, 64, 5000, slow.room, has_room=False) == 300
    assert lines_by_pace(300, 64, 5000, slow.room, has_room=True) == 1


def test_tuner_minds_the_pace_of_the_models_that_lines_name_and_not_the_date() -> None:
    asked: list[tuple[str, ...]] = []

    def pace(names: Iterable[str]) -> EnginePace | None:
        asked.append(tuple(names))
        return known

    room = LineRoom(lambda: 5000, lambda: True, pace=pace, num_batches=lambda: 2)
    tuner, early = LineTuner(room, 64), LinesLeft(10_000, HOUR_S, 2.0)
    known: EnginePace | None = None
    assert tuner.lines(0.0, 64, early, ("chat",), is_refused=False) == 64
    known = EnginePace(1000, 0.05, 0.1)
    assert tuner.lines(5.0, 200, early, ("chat",), is_refused=False) == 250
    assert tuner.lines(10.0, 250, early, ("chat",), is_refused=True) == 250
    known = EnginePace(1000, 0.2, 0.1)
    assert tuner.lines(15.0, 300, early, ("chat",), is_refused=False) == 50
    assert set(asked) == {("chat",)}
