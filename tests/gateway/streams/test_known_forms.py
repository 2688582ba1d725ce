"""Which bodies have a form, and which of them have the same."""

from typing import Any

import pytest

from serving.gateway.streams.known.forms import form_of, most_tokens_in

pytestmark = pytest.mark.imports_vllm

BODY: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "What is a slice?"}],
    "temperature": 0.5,
}


def body(**changes: Any) -> dict[str, Any]:
    made = BODY | changes
    return {name: value for name, value in made.items() if value is not ...}


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": ""}]},
        {"max_tokens": 7},
        {"max_completion_tokens": 7},
        {"max_tokens": None},
        {"user": "somebody"},
    ],
)
def test_what_differs_from_request_to_request_is_no_part_of_a_form(changes: dict[str, Any]) -> None:
    assert form_of(body(**changes), []) == form_of(BODY, []) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"temperature": 0.6},
        {"temperature": ...},
        {"temperature": None},
        {"seed": 1},
        {"stream_options": {"include_usage": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"service_tier": "flex"},
    ],
)
def test_everything_else_makes_another_form(changes: dict[str, Any]) -> None:
    other = form_of(body(**changes), [])
    assert other is not None
    assert other != form_of(BODY, [])


def test_fields_in_another_order_are_the_same_form() -> None:
    backwards = dict(reversed(body(chat_template_kwargs={"a": 1, "b": 2}).items()))
    backwards["chat_template_kwargs"] = {"b": 2, "a": 1}
    forwards = body(chat_template_kwargs={"a": 1, "b": 2})
    assert form_of(backwards, []) == form_of(forwards, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": ...},
        {"stream": False},
        {"stream": 1},
        {"n": 2},
        {"n": 1.5},
        {"user": 5},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"max_tokens": "7"},
        {"max_tokens": 7.0},
        {"max_tokens": 2**31},
        {"max_completion_tokens": 2**70},
        {"temperature": "\ud800"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "x"}] * 17},
        {"messages": "x"},
        {"messages": ["x"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
        {"stop": "x"},
        {"tools": []},
        {"echo": True},
        {"priority": 0},
        {"documents": []},
        {"unheard_of": 1},
    ],
)
def test_body_that_is_more_or_less_has_none(changes: dict[str, Any]) -> None:
    assert form_of(body(**changes), []) is None


@pytest.mark.parametrize("what", [None, [], "x", 5])
def test_what_is_no_object_has_none(what: object) -> None:
    assert form_of(what, []) is None


def test_header_that_vllm_reads_leaves_none() -> None:
    assert form_of(BODY, [(b"accept", b"*/*"), (b"x-request-id", b"1")]) == form_of(BODY, [])
    for name in (b"x-session-id", b"x-data-parallel-rank", b"x-vllm-priority", b"traceparent"):
        assert form_of(BODY, [(name, b"1")]) is None


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ],
)
def test_newer_field_counts_for_the_longest_answer(
    fields: dict[str, Any], most: int | None
) -> None:
    assert most_tokens_in(body(**fields)) == most
