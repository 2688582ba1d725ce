"""Which tokens count as nearly as likely: by a fixed gap, or by one step of the logits' type."""

import pytest

from deployments.first_run.stages.correctness import judged_gaps

BF16_STEP, SMALL_STEP = 0.125, 0.0625


@pytest.mark.parametrize(
    ("gap", "step", "is_right"),
    [
        (0.0, BF16_STEP, True),
        (0.09, SMALL_STEP, True),
        (0.11, SMALL_STEP, False),
        # Two logits between 16 and 32 that bfloat16 tells apart by no less.
        (0.12501, BF16_STEP, True),
        (0.25, BF16_STEP, False),
    ],
)
def test_gap_of_one_step_is_a_near_tie(gap: float, step: float, is_right: bool) -> None:
    wrong, near, whole = judged_gaps([[(0.0, step), (gap, step)]], 0.1, "the model")

    assert wrong.is_met is is_right
    assert near.measured == str(int(is_right and gap > 0))
    assert whole.measured == f"{int(gap == 0)} of 1"


def test_step_of_float32_is_no_excuse() -> None:
    wrong, *_ = judged_gaps([[(0.0011, 2**-19)]], 0.001, "the model")

    assert not wrong.is_met
    assert wrong.measured == "1 of 1, the worst by 0.0011 nat"


def test_no_answers_are_no_proof() -> None:
    assert not judged_gaps([], 0.1, "the model")[0].is_met
