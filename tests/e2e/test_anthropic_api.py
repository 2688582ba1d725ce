"""Anthropic's Messages API against the running application, asked by Anthropic's own client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from .answers import ANSWER_TIMEOUT_S
from .application import RunningApplication

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

MODEL = "slicewise-demo"
QUESTION = [{"role": "user", "content": "What is Slicewise?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(demo_application: RunningApplication) -> Iterator[Anthropic]:
    url = demo_application.base_url
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


def ask(client: Anthropic, **options: Any) -> Any:
    """One greedy message."""
    defaults = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
    return client.messages.create(**(defaults | {"extra_body": {"temperature": 0}} | options))


def test_message_answers_in_words_with_usage(client: Anthropic) -> None:
    message = ask(client, max_tokens=200)
    (block,) = message.content
    assert "slicewise" in block.text.lower()
    assert (message.role, message.type) == ("assistant", "message")
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def test_message_that_is_cut_says_so(client: Anthropic) -> None:
    message = ask(client, max_tokens=5)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5


def test_message_stream_is_the_whole_answer_in_parts(client: Anthropic) -> None:
    whole = ask(client)
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
    with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(parts) > 1  # how many is the machine's: vLLM joins what its client has not taken
    assert "".join(parts) == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24


def test_system_and_turns_are_part_of_the_prompt(client: Anthropic) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "A platform."}, *QUESTION]
    plain = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    more = client.messages.count_tokens(model=MODEL, messages=turns, system="Be brief.")
    assert 0 < plain < more.input_tokens
    message = ask(client, messages=turns, system="Be brief.")
    assert message.usage.input_tokens == more.input_tokens


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_forced_tool_is_used_with_valid_input(client: Anthropic, streamed: bool) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 80,
    }
    if streamed:
        with client.messages.stream(**options) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**options)
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert block.name == "get_weather"
    assert block.input["city"] in {"Paris", "Oslo"}
    assert message.stop_reason == "tool_use"


def test_tool_result_is_answered(client: Anthropic) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": json.dumps({"sky": "sunny"})}
    turns = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    message = ask(client, messages=turns, tools=[WEATHER], max_tokens=40)
    assert message.content[0].type == "text"


def test_unknown_model_is_404_in_anthropics_shape(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="claude-none")
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert "'claude-none'" in body["error"]["message"]


def test_malformed_message_is_400_and_names_the_field(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages="hello")
    assert "messages" in str(caught.value.body)


def test_prompt_that_is_too_long_is_400_with_both_numbers(client: Anthropic) -> None:
    words = [{"role": "user", "content": "slice " * 4000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages=words)
    assert caught.value.body["type"] == "error"
    message = caught.value.body["error"]["message"]
    assert "2048" in message
    assert "2049" in message  # vLLM counts no further than it must
