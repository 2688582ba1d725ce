"""What a request that is computed again goes on with, while tokens are in flight."""

from dataclasses import dataclass, field

import pytest

from serving.engine.tpu.known_tokens import forget_unsampled, restore_known

PROMPT = [11, 12, 13]


@dataclass
class State:
    """Of a request whose last token was in flight when it left the batch: a zero is noted."""

    output_token_ids: list[int]
    num_prompt_tokens: int = len(PROMPT)


@dataclass
class Step:
    """A step of one request, by vLLM's names."""

    num_output: int
    known: list[int] | None
    resumed_req_ids: set[str] = field(default_factory=set)

    @property
    def req_ids(self) -> list[str]:
        return ["a"]

    @property
    def num_output_tokens(self) -> list[int]:
        return [self.num_output]

    @property
    def all_token_ids(self) -> dict[str, list[int]]:
        return {} if self.known is None else {"a": PROMPT + self.known}


@pytest.mark.parametrize(
    ("noted", "num_output", "known", "expected"),
    [
        ([7, 8, 0], 3, [7, 8, 9], [7, 8, 9]),  # preempted while the third was in flight
        ([7, 8], 3, [7, 8, 9], [7, 8, 9]),
        ([7, 0, 0, 0], 2, [7, 8], [7, 8, 0, 0]),  # guesses; tpu-inference cuts what is too much
        ([7, 8, 0], 3, [7, 8], [7, 8, 0]),  # in flight still
        ([], 0, [], []),
    ],
)
@pytest.mark.parametrize("resumed", [set(), {"a"}], ids=["paused", "preempted"])
def test_request_that_comes_back_has_what_is_known(
    noted: list[int], num_output: int, known: list[int], expected: list[int], resumed: set[str]
) -> None:
    states = {"a": State(list(noted))}
    restored = restore_known(Step(num_output, known, resumed), states, set())
    assert states["a"].output_token_ids == expected
    assert restored == (["a"] if expected != noted else [])
    assert restore_known(Step(num_output, known, resumed), states, set()) == []


def test_request_that_stays_in_the_batch_keeps_what_is_in_flight() -> None:
    states = {"a": State([7, 8, 0])}
    assert restore_known(Step(3, None), states, {"a"}) == []
    assert restore_known(Step(3, [7, 8, 9]), states, {"a"}) == []
    assert states["a"].output_token_ids == [7, 8, 0]


def test_request_preempted_and_resumed_while_it_is_in_the_batch_is_restored() -> None:
    states = {"a": State([7, 8, 0])}
    assert restore_known(Step(3, [7, 8, 9], {"a"}), states, {"a"}) == ["a"]
    assert states["a"].output_token_ids == [7, 8, 9]


@dataclass
class InFlight:
    """A step of three requests; of the second it has only a part."""

    req_ids: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    discard_sampled_tokens_req_indices: list[int] = field(default_factory=lambda: [1])
    placeholder_req_id_to_index: dict[str, int] = field(
        default_factory=lambda: {"a": 0, "b": 1, "c": 2}
    )


def test_request_of_which_a_step_has_a_part_gets_none_of_its_tokens() -> None:
    step = InFlight()
    forget_unsampled(step)
    forget_unsampled(step)
    assert step.placeholder_req_id_to_index == {"a": 0, "c": 2}
    forget_unsampled(None)
