"""Which tokens count as nearly as likely, as doubtful, and as wrong."""

import pytest

from deployments.first_run.stages.correctness import judged_gaps

BF16_STEP, SMALL_STEP = 0.125, 0.03125
NUM_TOKENS = 200


@pytest.mark.parametrize(
    ("gap", "step", "is_near"),
    [
        (0.0, BF16_STEP, True),
        (0.09, SMALL_STEP, True),
        (0.11, SMALL_STEP, False),
        # Two logits between 16 and 32 that bfloat16 tells apart by no less.
        (0.12501, BF16_STEP, True),
        (0.25, BF16_STEP, False),
    ],
)
def test_gap_of_one_step_is_a_near_tie(gap: float, step: float, is_near: bool) -> None:
    wrong, doubtful, near, whole = judged_gaps([[(0.0, step), (gap, step)]], 0.1, "the model")

    assert wrong.is_met
    assert doubtful.is_met is is_near
    assert doubtful.measured == f"{int(not is_near)} of 2"
    assert near.measured == str(int(is_near and gap > 0))
    assert whole.measured == f"{int(gap == 0)} of 1"


@pytest.mark.parametrize(("num_doubtful", "is_met"), [(2, True), (3, False)])
def test_few_tokens_may_be_further_off_where_hidden_states_are_rounded(
    num_doubtful: int, is_met: bool
) -> None:
    # As four steps of logits between 4 and 8, which a right engine came to once in 640 tokens.
    gaps = [(0.125, SMALL_STEP)] * num_doubtful
    answer = gaps + [(0.0, SMALL_STEP)] * (NUM_TOKENS - num_doubtful)

    wrong, doubtful, near, _ = judged_gaps([answer], 0.1, "the model")

    assert (wrong.is_met, doubtful.is_met) == (True, is_met)
    assert wrong.measured == "0 of 200, the worst by 0.125 nat"
    assert near.measured == "0"


@pytest.mark.parametrize(("gap", "step"), [(0.25, SMALL_STEP), (1.0, BF16_STEP), (9.0, BF16_STEP)])
def test_one_token_that_is_eight_steps_off_is_wrong(gap: float, step: float) -> None:
    answer = [(gap, step)] + [(0.0, step)] * NUM_TOKENS

    wrong, doubtful, *_ = judged_gaps([answer], 0.1, "the model")

    assert not wrong.is_met
    assert wrong.measured == f"1 of 201, the worst by {gap:.3g} nat"
    assert doubtful.is_met


def test_step_of_float32_is_no_excuse() -> None:
    wrong, *_ = judged_gaps([[(0.0011, 2**-19)]], 0.001, "the model")

    assert not wrong.is_met
    assert wrong.measured == "1 of 1, the worst by 0.0011 nat"


def test_no_answers_are_no_proof() -> None:
    assert not judged_gaps([], 0.1, "the model")[0].is_met
