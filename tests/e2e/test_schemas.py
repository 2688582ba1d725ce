"""A schema that was asked for is kept, on every route, with the shipped configuration."""

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from .answers import ANSWER_TIMEOUT_S
from .application import RunningApplication
from .test_resumed_kinds import Ending

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

MODEL = "slicewise-demo"
SCHEMA = {
    "type": "object",
    "properties": {
        "zone": {"type": "string", "pattern": "^[a-z]{3}$"},
        "chips": {"type": "integer", "enum": [4, 8]},
    },
    "required": ["zone", "chips"],
    "additionalProperties": False,
}
_MESSAGES = [{"role": "user", "content": "Which slice is free?"}]
_CHAT = {"model": MODEL, "messages": _MESSAGES, "temperature": 0, "max_tokens": 120}
_COMPLETION = {"model": MODEL, "prompt": "A slice is", "temperature": 0, "max_tokens": 120}
_RESPONSE = {"model": MODEL, "input": "Which?", "temperature": 0, "max_output_tokens": 120}
_FORM = {"type": "json_schema", "json_schema": {"name": "slice", "schema": SCHEMA}}
_TOOL = {"name": "take", "description": "Takes a slice.", "parameters": SCHEMA}
_CHAT_TOOL = {"type": "function", "function": _TOOL}
_NAMED = {"type": "function", "function": {"name": "take"}}
_TEXT = {"format": {"type": "json_schema", "name": "slice", "schema": SCHEMA, "strict": True}}
_ANTHROPIC_TOOL = {"name": "take", "description": "Takes it.", "input_schema": SCHEMA}

JSON_ASKED = {
    "chat": ("/v1/chat/completions", _CHAT | {"response_format": _FORM}),
    "completion": ("/v1/completions", _COMPLETION | {"response_format": _FORM}),
    "response": ("/v1/responses", _RESPONSE | {"text": _TEXT}),
    "required tool": (
        "/v1/chat/completions",
        _CHAT | {"tools": [_CHAT_TOOL], "tool_choice": "required"},
    ),
    "named tool": ("/v1/chat/completions", _CHAT | {"tools": [_CHAT_TOOL], "tool_choice": _NAMED}),
    "tool of a response": (
        "/v1/responses",
        _RESPONSE | {"tools": [{"type": "function", **_TOOL}], "tool_choice": "required"},
    ),
    "tool of a message": (
        "/v1/messages",
        _CHAT | {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "take"}},
    ),
    "any tool of a message": (
        "/v1/messages",
        _CHAT | {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
    ),
    "message": (
        "/v1/messages",
        _CHAT | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
}
JSON_ASKED |= {
    f"{name}, {'thinking' if thinks else 'not thinking'}": (
        path,
        body | {"chat_template_kwargs": {"enable_thinking": thinks}},
    )
    for name, (path, body) in JSON_ASKED.items()
    if path == "/v1/chat/completions"
    for thinks in (True, False)
}
TEXT_ASKED: dict[str, tuple[Mapping[str, Any], str]] = {
    "regex": ({"regex": "[0-9]{5}x"}, "[0-9]{5}x"),
    "choice": ({"choice": ["v5e slice", "v6e slice"]}, "v[56]e slice"),
    "grammar": ({"grammar": 'root ::= "host " [0-9] [0-9]'}, "host [0-9][0-9]"),
}


def words_of(application: RunningApplication, path: str, body: Mapping[str, Any]) -> str:
    """What the answer says, or the arguments of the tool that it calls, told as a stream."""
    ending = Ending()
    with httpx.stream(
        "POST",
        f"{application.base_url}{path}",
        json={**body, "stream": True},
        timeout=ANSWER_TIMEOUT_S,
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ending.take(json.loads(line.removeprefix("data: ")))
    assert ending.errors == []
    return ending.words


def whole(application: RunningApplication, path: str, body: Mapping[str, Any]) -> str:
    """The same, told at once."""
    answer = httpx.post(f"{application.base_url}{path}", json=dict(body), timeout=ANSWER_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if path == "/v1/messages":
        (part,) = [each for each in told["content"] if each["type"] in ("text", "tool_use")]
        return str(part["text"]) if part["type"] == "text" else json.dumps(part["input"])
    if path == "/v1/responses":
        (part,) = [each for each in told["output"] if each["type"] in ("message", "function_call")]
        return str(part.get("arguments") or part["content"][0]["text"])
    (choice,) = told["choices"]
    calls = choice.get("message", {}).get("tool_calls")
    if calls:
        return str(calls[0]["function"]["arguments"])
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


@pytest.mark.parametrize("name", JSON_ASKED)
def test_schema_is_kept(demo_application: RunningApplication, name: str) -> None:
    path, body = JSON_ASKED[name]
    for ask in (whole, words_of):
        said = ask(demo_application, path, body).removeprefix("take")
        found = json.loads(said)
        assert re.fullmatch("[a-z]{3}", found["zone"]), said
        assert found["chips"] in (4, 8), said
        assert found.keys() == {"zone", "chips"}


@pytest.mark.parametrize("name", TEXT_ASKED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_form_of_a_text_is_kept(demo_application: RunningApplication, path: str, name: str) -> None:
    asked, form = TEXT_ASKED[name]
    bodies = {
        "/v1/chat/completions": _CHAT,
        "/v1/completions": _COMPLETION,
        "/v1/responses": _RESPONSE,
    }
    body = bodies[path] | {"structured_outputs": asked}
    assert re.fullmatch(form, whole(demo_application, path, body))
    assert re.fullmatch(form, words_of(demo_application, path, body))
