"""Hosts agree on when a prompt is done, whichever of them reads the results."""

import pytest

from serving.engine.tpu.prompt_logprobs import done_prompts


@pytest.mark.parametrize(
    ("num_computed", "done"),
    [
        ({}, []),  # it is new in this step, or not in it
        ({"r": 0}, []),
        ({"r": 9}, []),  # a chunk of it is left
        ({"r": 10}, ["r"]),
        ({"r": 12}, ["r"]),
        ({"other": 10}, []),
    ],
)
def test_prompt_is_done_once_all_of_it_was_computed(
    num_computed: dict[str, int], done: list[str]
) -> None:
    assert list(done_prompts(["r"], num_computed, {"r": 10})) == done


def test_request_that_is_gone_is_not_done() -> None:
    assert list(done_prompts(["r"], {"r": 10}, {})) == []
