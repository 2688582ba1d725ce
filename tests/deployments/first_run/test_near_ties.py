"""Which tokens count as nearly as likely, as doubtful, and as wrong."""

import pytest

from deployments.first_run.requests.asking import StreamedAnswer
from deployments.first_run.stages.near_ties import first_gap, judged_gaps, judged_streams

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


def answer(tokens: list[int], *alternatives: dict[int, float]) -> StreamedAnswer:
    return StreamedAnswer(tokens, list(alternatives))


def test_same_tokens_have_no_gap() -> None:
    assert first_gap(answer([1, 2]), answer([1, 2])) is None


def test_first_other_token_is_as_far_as_the_first_answer_says() -> None:
    before = answer([1, 2, 3], {1: -0.1, 9: -4}, {2: -0.7, 5: -0.75}, {3: -0.1})
    assert first_gap(before, answer([1, 5, 8])) == pytest.approx(0.05)


def test_other_token_that_was_never_likely_is_infinitely_far() -> None:
    before = answer([1, 2], {1: -0.1, 9: -4}, {2: -0.7, 5: -0.75})
    assert first_gap(before, answer([1, 7])) == float("inf")
    assert first_gap(answer([1]), answer([2])) == float("inf")


def streams(*gaps: float) -> tuple[list[StreamedAnswer], list[StreamedAnswer]]:
    """Sixteen before and after a kill, the first of which have these gaps."""
    told = [answer([1, 2], {1: -0.1}, {2: -0.5, 3: -0.5 - gap}) for gap in gaps]
    same = [answer([1, 2], {1: -0.1}, {2: -0.5})] * (16 - len(gaps))
    return told + same, [answer([1, 3])] * len(gaps) + same


@pytest.mark.parametrize(
    ("gaps", "is_wrong", "is_doubtful"),
    [
        ((), False, False),
        ((0.05, 0.1, 0.125) * 5, False, False),
        ((0.13, 0.9), False, False),
        ((0.13, 0.9, 0.13), False, True),
        ((1.0,), True, False),
        ((float("inf"),), True, False),
    ],
)
def test_streams_of_a_lost_engine_may_differ_as_an_engine_that_is_right_does(
    gaps: tuple[float, ...], is_wrong: bool, is_doubtful: bool
) -> None:
    wrong, doubtful, near = judged_streams(*streams(*gaps), "bfloat16")

    assert (wrong.is_met, doubtful.is_met) == (not is_wrong, not is_doubtful)
    assert near.measured == str(sum(gap <= 0.125 for gap in gaps))


def test_streams_of_float32_are_what_they_were() -> None:
    wrong, *_ = judged_streams(*streams(0.0011), "float32")
    nearly, doubtful, near = judged_streams(*streams(0.0009), "float32")

    assert not wrong.is_met
    assert wrong.what == "streams with a token that was less likely before by 0.001 nat or more"
    assert (nearly.is_met, doubtful.is_met, near.measured) == (True, True, "1")


def test_no_streams_are_no_proof() -> None:
    assert not judged_streams([], [], "bfloat16")[0].is_met
