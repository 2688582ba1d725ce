"""OpenAI's API against the running application, asked by OpenAI's own client."""

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam
from prometheus_client.parser import text_string_to_metric_families

from .answers import ANSWER_TIMEOUT_S, is_idle
from .application import RunningApplication, engine_ids

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

MODEL = "slicewise-demo"
MAX_MODEL_LEN = 2048
QUESTION = [{"role": "user", "content": "What is Slicewise?"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,  # otherwise vLLM leaves the arguments to the model
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Anna", "Ben"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def client(demo_application: RunningApplication) -> Iterator[OpenAI]:
    url = f"{demo_application.base_url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@pytest.fixture
def http(demo_application: RunningApplication) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_application.base_url, timeout=ANSWER_TIMEOUT_S) as http:
        yield http


def ask(client: OpenAI, **options: Any) -> Any:
    """One greedy chat completion."""
    defaults = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**(defaults | options))


def complete(client: OpenAI, **options: Any) -> Any:
    """One greedy completion."""
    defaults = {"model": MODEL, "prompt": "A slice is", "temperature": 0, "max_tokens": 12}
    return client.completions.create(**(defaults | options))


# -- models and chat --


def test_models_lists_the_served_model(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert model.model_dump()["max_model_len"] == MAX_MODEL_LEN


def test_chat_answers_in_words_with_usage(client: OpenAI) -> None:
    answer = ask(client, max_tokens=200)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert "slicewise" in choice.message.content.lower()
    usage = answer.usage
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_stream_is_the_whole_answer_in_parts(client: OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert {chunk.usage for chunk in chunks} == {None}


def test_stream_includes_usage_in_its_last_chunk_when_asked(client: OpenAI) -> None:
    *parts, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert all(part.choices for part in parts)


def test_chat_returns_n_choices(client: OpenAI) -> None:
    answer = ask(client, n=3, temperature=2.0, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 3 * 24


def test_chat_logprobs_name_every_token_of_the_answer(client: OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert len(content) == 8
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.token == entry.top_logprobs[0].token  # greedy


# -- completions --


def test_completion_stream_is_the_whole_text_in_parts(client: OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12


def test_completion_echo_repeats_the_prompt_with_its_logprobs(client: OpenAI) -> None:
    bare = complete(client).choices[0].text
    answer = complete(client, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "A slice is" + bare
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_completion_takes_several_prompts_and_token_ids(client: OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"model": MODEL, "prompt": "A slice is"}).json()["tokens"]
    by_text = complete(client, prompt=["A slice is", "A chip is"])
    by_ids = complete(client, prompt=ids)
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[5:9]
    answer = complete(client, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == text[: text.index(stop)]
    kept = complete(client, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop)] + stop


def test_stop_string_in_a_stream_never_shows(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[5:9]
    chunks = list(complete(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logit_bias_forces_a_token_and_penalties_count_against_it(
    client: OpenAI, http: httpx.Client
) -> None:
    body = {"model": MODEL, "prompt": "x", "add_special_tokens": False}
    (token,) = http.post("/tokenize", json=body).json()["tokens"]
    forced = complete(client, logit_bias={str(token): 100}, max_tokens=4)
    assert forced.choices[0].text == "xxxx"
    prompt = "tpu tpu tpu tpu tpu tpu tpu"
    plain = complete(client, prompt=prompt, max_tokens=32).choices[0].text
    assert plain.count("tpu") > 16
    penalised = complete(client, prompt=prompt, max_tokens=32, frequency_penalty=2.0)
    assert penalised.choices[0].text.count("tpu") < 16


def test_seed_makes_sampling_repeatable(client: OpenAI) -> None:
    options = {"temperature": 1.5, "max_tokens": 16}
    first, again, other = (complete(client, seed=seed, **options) for seed in (7, 7, 8))
    assert first.choices[0].text == again.choices[0].text != other.choices[0].text


def test_min_tokens_and_ignore_eos_are_passed_on(client: OpenAI) -> None:
    answer = ask(client, max_tokens=150, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 150
    assert answer.choices[0].finish_reason == "length"


# -- structured output --


def test_json_schema_answer_is_valid(client: OpenAI) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    options = {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer = ask(client, max_tokens=400, **options).choices[0]
    person = json.loads(answer.message.content)
    assert person["name"] in {"Anna", "Ben"}
    assert isinstance(person["age"], int)
    parts = ask(client, max_tokens=400, stream=True, **options)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == answer.message.content


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"v[56]e-(8|16)"}, r"v[56]e-(8|16)"),
        ({"choice": ["ready", "draining"]}, r"ready|draining"),
        ({"grammar": 'root ::= "chips=" [0-9] [0-9]'}, r"chips=\d\d"),
        ({"json": {"enum": ["ready", "draining"]}}, r'"(ready|draining)"'),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_structured_output_follows_its_constraint(
    client: OpenAI, constraint: dict[str, Any], pattern: str
) -> None:
    answer = ask(client, extra_body={"structured_outputs": constraint})
    assert re.fullmatch(pattern, answer.choices[0].message.content, re.DOTALL)


# -- tools and reasoning --


def test_forced_tool_call_has_valid_arguments(client: OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=60).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Oslo"}
    assert call.id


def test_required_tool_call_streams_in_parts(client: OpenAI) -> None:
    chunks = list(ask(client, tools=[WEATHER], tool_choice="required", max_tokens=80, stream=True))
    deltas = [
        call
        for chunk in chunks
        if chunk.choices
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(delta.function.name or "" for delta in deltas) == "get_weather"
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    assert json.loads(arguments)["city"] in {"Paris", "Oslo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_auto_tool_call_is_parsed_from_the_models_own_words(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = ask(client, messages=messages, tools=[WEATHER], tool_choice="auto", max_tokens=80)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_reasoning_is_split_from_the_answer(client: OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(client, extra_body=thinking, max_tokens=400)
    message = answer.choices[0].message
    assert "slicewise" in message.content.lower()
    assert "<think>" not in message.content
    reasoning = message.model_dump()["reasoning"]
    assert reasoning.strip()
    chunks = list(ask(client, extra_body=thinking, max_tokens=400, stream=True))
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == reasoning
    assert "".join(delta["content"] or "" for delta in deltas) == message.content


# -- responses, tokens --


def test_responses_api_answers_and_streams(client: OpenAI) -> None:
    options = {"model": MODEL, "input": "What is a slice?", "temperature": 0}
    whole = client.responses.create(**options, max_output_tokens=24)
    assert whole.output_text
    assert whole.usage.output_tokens == 24
    events = list(client.responses.create(**options, max_output_tokens=24, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in {"response.completed", "response.incomplete"}


def test_detokenize_undoes_tokenize(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "A slice has chips."}
    tokens = http.post("/tokenize", json=body).raise_for_status().json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    body = {"model": MODEL, "tokens": tokens["tokens"]}
    assert http.post("/detokenize", json=body).json()["prompt"] == "A slice has chips."


# -- refusals --


def test_unknown_model_is_404_in_openais_shape(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-none")
    error = caught.value.body
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'gpt-none'" in error["message"]
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": QUESTION, "temperature": "hot"}, "temperature"),
        ({"messages": QUESTION, "temperature": -1}, "temperature"),
        ({"messages": QUESTION, "model": 7}, "model"),
        ({}, "messages"),
    ],
    ids=["messages", "type", "range", "model", "missing"],
)
def test_malformed_field_is_400_and_named(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL} | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in str(error["param"])
    assert error["message"]
    assert error["type"]


def test_body_that_is_no_json_is_400(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/completions", content=b'{"model": ', headers=headers)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_prompt_that_is_too_long_is_400_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=[5] * (MAX_MODEL_LEN + 10), max_tokens=1)
    message = caught.value.body["message"]
    assert str(MAX_MODEL_LEN) in message
    assert str(MAX_MODEL_LEN + 10) in message


def test_max_tokens_beyond_the_context_is_400_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, max_tokens=MAX_MODEL_LEN + 1)
    message = caught.value.body["message"]
    assert str(MAX_MODEL_LEN) in message
    assert str(MAX_MODEL_LEN + 1) in message


FORGED_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "A slice is"},
    "/v1/responses": {"input": "A slice is"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 8},
}


@pytest.mark.parametrize("path", FORGED_ROUTES)
def test_request_that_says_what_it_has_emitted_is_400_and_costs_no_engine(
    http: httpx.Client, demo_application: RunningApplication, path: str
) -> None:
    before = engine_ids(demo_application.fleet())
    for forged in (1.5, 5, "tokens", [2_000_000_000], [1.5], [5]):
        arguments = {"slicewise_emitted_token_ids": forged}
        body = {"model": MODEL, "vllm_xargs": arguments, **FORGED_ROUTES[path]}
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "slicewise_emitted_token_ids" in answer.text
    # Both engines answer still, and are those of before.
    fair = {"model": MODEL, **FORGED_ROUTES[path]}
    assert [http.post(path, json=fair).status_code for _ in range(4)] == [200] * 4
    assert engine_ids(demo_application.fleet()) == before


@pytest.mark.parametrize("stream", [False, True])
def test_large_body_gets_the_answer_of_the_same_one_short(http: httpx.Client, stream: bool) -> None:
    body = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 24,
        "temperature": 0,
        "stream": stream,
        "tools": [WEATHER],
    }
    short = json.dumps(body)
    large = f"{short[:-1]}{' ' * 400_000}}}"
    headers = {"content-type": "application/json", "x-request-id": "of-one-size"}
    answers = [
        http.post("/v1/chat/completions", content=each, headers=headers, timeout=120)
        for each in (short, large)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    first, second = (uncut(answer) if stream else untimed(answer.text) for answer in answers)
    assert first == second


def untimed(text: str) -> str:
    return re.sub(r'"created": ?\d+', "", text)


def uncut(answer: httpx.Response) -> tuple[str, list[str]]:
    """A stream's text, and what its events say besides: in how many of them it comes varies."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text = "".join(delta.pop("content", None) or "" for delta in deltas)
    return text, sorted({untimed(json.dumps(chunk, sort_keys=True)) for chunk in chunks})


def test_body_that_is_too_large_is_413(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x" * (16 * 1024 * 1024)}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_unknown_route_is_404(http: httpx.Client) -> None:
    for path in ("/v1/nothing", "/v1/load_lora_adapter", "/server_info"):
        answer = http.post(path, json={"model": MODEL})
        assert answer.status_code == 404
        assert path in answer.json()["error"]["message"]


# -- what surrounds a request --


def test_request_id_is_taken_over_or_made(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "A", "max_tokens": 1}
    given = http.post("/v1/completions", json=body, headers={"x-request-id": "mine-42"})
    assert given.headers.get_list("x-request-id") == ["mine-42"]
    assert "mine-42" in given.json()["id"]
    made = [http.post("/v1/completions", json=body).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    hostile = http.post("/v1/completions", json=body, headers={"x-request-id": "a b;c=1"})
    assert "a b;c=1" not in hostile.json()["id"]


def test_health_and_metrics_answer(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    page = http.get("/metrics").raise_for_status().text
    assert "vllm:prompt_tokens_total" in page
    families = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    assert len(families) == len(set(families))


def told(page: str, name: str) -> dict[tuple[str, ...], float]:
    """A family's values by engine and compute class."""
    return {
        (sample.labels.get("engine", ""), sample.labels.get("compute_class", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def test_metrics_tell_every_engine_and_each_first_token(
    http: httpx.Client, demo_application: RunningApplication
) -> None:
    first_tokens = "slicewise_time_to_first_token_seconds_count"
    before = sum(told(http.get("/metrics").text, first_tokens).values())
    body = {"model": MODEL, "prompt": "A", "max_tokens": 2}
    for _ in range(3):
        http.post("/v1/completions", json=body).raise_for_status()
    page = http.get("/metrics").raise_for_status().text
    assert sum(told(page, first_tokens).values()) == before + 3
    # What an engine has done comes with a heartbeat, once a second.
    engines = {(engine_id, "local") for engine_id in engine_ids(demo_application.fleet())}

    def are_told(_fleet: object) -> bool:
        now = http.get("/metrics").text
        tokens = told(now, "vllm:generation_tokens_total")
        running = told(now, "vllm:num_requests_running")
        return tokens.keys() == running.keys() == engines and sum(tokens.values()) >= 6

    demo_application.wait_fleet(are_told)


def test_engines_tell_when_they_have_their_weights(demo_application: RunningApplication) -> None:
    for row in demo_application.fleet()["slices"]:
        loading = [each["reason"] for each in row["history"] if each["state"] == "loading"]
        assert len(loading) == 2
        assert "compiles" in loading[1]


def test_client_that_leaves_frees_its_sequence(demo_application: RunningApplication) -> None:
    url = f"{demo_application.base_url}/v1"
    with OpenAI(base_url=url, api_key="none") as client:
        options = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
        stream = complete(client, stream=True, **options)
        next(iter(stream))
        demo_application.wait_fleet(lambda fleet: not is_idle(fleet))
        stream.close()
        # 1,900 tokens would take far longer than this.
        demo_application.wait_idle(timeout_s=2)


def test_prompts_and_answers_are_in_no_log(
    client: OpenAI, demo_application: RunningApplication
) -> None:
    marker = f"secret{uuid.uuid4().hex}"
    request_id = f"trace-{uuid.uuid4().hex}"
    headers = {"x-request-id": request_id}
    messages = [{"role": "user", "content": marker}]
    ask(client, messages=messages, extra_headers=headers)
    only = {"structured_outputs": {"choice": [f"answer{marker}"]}}
    echoed = ask(client, messages=messages, extra_body=only, max_tokens=200)
    assert echoed.choices[0].message.content == f"answer{marker}"
    with pytest.raises(openai.BadRequestError):
        ask(client, messages=messages, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=marker * 1000)
    texts = [path.read_bytes() for path in demo_application.log_files()]
    assert not any(marker.encode() in text for text in texts)
    # That the logs were the right ones: the request is in them, by its id.
    assert any(request_id.encode() in text for text in texts)
