"""Every kind of damage that a resume can do to an answer is counted to the token."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.answer_diff import ANCHOR, TokenDifference, diff_answers
from loadtest.client.expected_output import (
    RIGHT,
    AnswerCheck,
    RecordedAnswers,
    check_paced,
    compare,
)
from loadtest.errors import LoadTestError
from loadtest.planned_request import Api, PlannedRequest
from serving.domain.tokens.paced import LETTERS, paced_token, paced_tokens

LENGTH = 120
# A length and how many of these tokens there are of a known answer, somewhere.
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=8)
PLACES = st.integers(1, LENGTH - 1)
RUNS = st.integers(1, 40)


def answer(prompt: list[int], count: int = LENGTH) -> list[int]:
    return paced_tokens(prompt, count, LETTERS)


def planned(output_tokens: int = LENGTH, model: str = "m") -> PlannedRequest:
    return PlannedRequest("r", 0.0, model, Api.COMPLETIONS, (), output_tokens)


@given(PROMPTS, st.integers(0, 50))
def test_whole_answer_is_its_tokens_one_by_one(prompt: list[int], count: int) -> None:
    one_by_one = [paced_token(prompt, position, LETTERS) for position in range(count)]
    assert paced_tokens(prompt, count, LETTERS) == one_by_one


@given(PROMPTS)
def test_right_answer_is_right(prompt: list[int]) -> None:
    assert compare(answer(prompt), answer(prompt)) == RIGHT


@given(PROMPTS, PLACES, RUNS)
def test_gap_is_lost_tokens(prompt: list[int], place: int, run: int) -> None:
    whole = answer(prompt)
    received = whole[:place] + whole[place + run :]
    assert compare(whole, received) == AnswerCheck(LENGTH - len(received), 0, 0)


@given(PROMPTS, st.integers(0, LENGTH))
def test_cut_end_is_lost_tokens(prompt: list[int], place: int) -> None:
    whole = answer(prompt)
    assert compare(whole, whole[:place]) == AnswerCheck(LENGTH - place, 0, 0)


@given(PROMPTS, PLACES, RUNS, st.integers(1, 3))
def test_run_that_comes_again_at_once_is_repeated_tokens(
    prompt: list[int], place: int, run: int, times: int
) -> None:
    whole = answer(prompt)
    again = whole[max(0, place - run) : place] * times
    assert compare(whole, whole[:place] + again + whole[place:]) == AnswerCheck(0, len(again), 0)


@given(PROMPTS, st.integers(0, 20), st.integers(ANCHOR, 40), st.integers(60, LENGTH))
def test_run_of_long_ago_is_repeated_tokens(
    prompt: list[int], begin: int, run: int, place: int
) -> None:
    whole = answer(prompt)
    received = whole[:place] + whole[begin : begin + run] + whole[place:]
    assert compare(whole, received) == AnswerCheck(0, run, 0)


@given(PROMPTS, st.integers(0, LENGTH), st.lists(st.integers(200, 255), min_size=1, unique=True))
def test_run_of_another_answer_is_foreign_tokens(
    prompt: list[int], place: int, run: list[int]
) -> None:
    whole = answer(prompt)
    assert compare(whole, whole[:place] + run + whole[place:]) == AnswerCheck(0, 0, len(run))


@given(PROMPTS, PROMPTS, PLACES, st.integers(ANCHOR, 30))
def test_run_of_another_answer_in_the_same_letters_is_foreign_tokens(
    prompt: list[int], other: list[int], place: int, run: int
) -> None:
    whole, foreign = answer(prompt), answer([*other, 256], run)
    check = compare(whole, whole[:place] + foreign + whole[place:])
    assert check == AnswerCheck(0, 0, run)


@given(PROMPTS, PLACES, RUNS, st.lists(st.integers(200, 255), min_size=1, unique=True))
def test_run_in_place_of_another_is_lost_and_foreign(
    prompt: list[int], place: int, run: int, foreign: list[int]
) -> None:
    whole = answer(prompt)
    received = whole[:place] + foreign + whole[place + run :]
    lost = min(run, LENGTH - place)
    assert compare(whole, received) == AnswerCheck(lost, 0, len(foreign))


@given(PROMPTS, st.integers(0, 40), RUNS)
def test_answer_that_runs_on_is_foreign_tokens(prompt: list[int], length: int, more: int) -> None:
    whole = answer(prompt, length + more)
    received = whole[:length] + [token + 100 for token in whole[length:]]
    check = compare(whole[:length], received)
    assert check.lost == 0
    assert check.repeated + check.foreign == more


def test_damages_are_told_one_by_one() -> None:
    whole = answer([1, 2, 3])
    received = whole[:20] + whole[25:50] + whole[40:80] + [200, 201] + whole[80:]
    assert list(diff_answers(whole, received)) == [
        TokenDifference(20, 5, 0, 0),
        TokenDifference(45, 0, 10, 0),
        TokenDifference(85, 0, 0, 2),
    ]


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60))
def test_counts_of_any_two_answers_add_up(expected: list[int], received: list[int]) -> None:
    check = compare(expected, received)
    intact = len(expected) - check.lost
    assert intact == len(received) - check.repeated - check.foreign
    assert (check == RIGHT) == (expected == received)
    assert min(check.lost, check.repeated, check.foreign) >= 0


def test_paced_answers_know_every_answer_by_its_prompt() -> None:
    assert check_paced([1, 2], answer([1, 2]), planned()) == AnswerCheck(0, 0, 0)
    of_another = check_paced([1, 2], answer([2, 1]), planned())
    assert of_another.lost == of_another.foreign > LENGTH // 2
    assert check_paced([1, 2], answer([1, 2], 7), planned(10)) == AnswerCheck(3, 0, 0)


def test_recorded_answers_survive_a_file_and_the_first_one_stands(tmp_path: Path) -> None:
    recorded = RecordedAnswers()
    recorded.record([1, 2], [5, 6, 7], planned())
    recorded.record([1, 2], [8, 8, 8], planned())
    recorded.save(tmp_path / "answers.jsonl")
    loaded = RecordedAnswers.load(tmp_path / "answers.jsonl")
    assert len(loaded) == 1
    assert loaded.check([1, 2], [5, 6, 7], planned(3)) == AnswerCheck(0, 0, 0)
    assert loaded.check([1, 2], [5, 7], planned(3)) == AnswerCheck(1, 0, 0)
    assert loaded.check([1, 2], [5, 6], planned(2)) == AnswerCheck(0, 0, 0)


def test_unknown_answers_are_not_judged() -> None:
    recorded = RecordedAnswers()
    recorded.record([1, 2], [5, 6, 7], planned())
    assert recorded.check([2, 1], [5, 6, 7], planned(3)) is None
    assert recorded.check([1, 2], [5, 6, 7], planned(3, model="other")) is None
    assert recorded.check([1, 2], [5, 6, 7, 8], planned(4)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1: "),
        ('{"prompt": "a", "tokens": [1]}\n{"prompt": "b"}', "line 2: .*`tokens`"),
        ('{"prompt": "a", "tokens": [1], "colour": 1}', "line 1: .*`colour`"),
        ('{"prompt": "a", "tokens": ["x"]}', r"line 1: .*\$.tokens"),
    ],
)
def test_file_of_something_else_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=words):
        RecordedAnswers.load(path)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"answers .*none\.jsonl cannot be read"):
        RecordedAnswers.load(tmp_path / "none.jsonl")
