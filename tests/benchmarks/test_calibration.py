"""How the two sides of the calibration are laid beside each other."""

import numpy as np
import pytest

from autoscaling.records import Fleet, Observation, Plan
from benchmarks.calibration import StaticRun
from benchmarks.calibration_live import Answered, Step
from benchmarks.calibration_report import changes_of, matched, mean_over_time, static_table


def steps(*targets: tuple[float, int]) -> list[Step]:
    return [
        Step(Observation(at_s, None, Fleet((), {})), Plan(at_s, {"spot": target}))
        for at_s, target in targets
    ]


def answered(ttft_s: list[float], tpot_s: list[float]) -> Answered:
    return Answered(np.arange(float(len(ttft_s))), np.array(ttft_s), np.array(tpot_s))


def test_change_of_two_slices_is_two_changes() -> None:
    course = steps((0.0, 0), (1.0, 2), (2.0, 2), (3.0, 1))
    assert changes_of(course, "spot", 1) == [1.0, 1.0]
    assert changes_of(course, "spot", -1) == [3.0]


@pytest.mark.parametrize(
    ("measured", "simulated", "expected"),
    [
        ([10.0, 200.0], [12.0, 190.0], [(10.0, 12.0), (200.0, 190.0)]),
        ([10.0, 200.0], [190.0], [(10.0, None), (200.0, 190.0)]),
        ([200.0], [10.0, 190.0], [(None, 10.0), (200.0, 190.0)]),
        ([10.0], [], [(10.0, None)]),
        ([], [10.0], [(None, 10.0)]),
    ],
)
def test_decisions_are_matched_only_with_those_near_them(
    measured: list[float], simulated: list[float], expected: list[tuple[float | None, float | None]]
) -> None:
    assert list(matched(measured, simulated)) == expected


def test_mean_over_time_weighs_by_how_long_a_number_held() -> None:
    course = steps((0.0, 1), (9.0, 11), (10.0, 99))
    assert mean_over_time(course, lambda step: step.plan.targets["spot"]) == pytest.approx(2.0)


def test_error_is_that_of_the_simulation_and_what_is_added_that_of_the_platform() -> None:
    measured, simulated = answered([0.2, 0.2], [0.05, np.nan]), answered([0.19, 0.19], [0.05, 0.05])
    table = static_table([StaticRun(1, 0.3, 1.2, measured, simulated, 0.1)])
    row = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    assert row[:4] == ["1", "30%", "2", "200 / 190 (-5%)"]
    assert row[5:] == ["50 / 50 (+0%)", "50 / 50 (+0%)", "+10.0", "+0.0"]
