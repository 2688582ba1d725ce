"""Requests of which a field or two have values that no polite client sends, all else being valid.

The fields are those of vLLM's own request models, so that a new vLLM's fields are tried too. The
values are JSON text: some are no value of Python's, or no JSON at all.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams

MODEL = "slicewise-demo"
# What clients say, and no log may.
PRIVATE = "the zebra quietly"
_MESSAGES = [{"role": "user", "content": f"Say {PRIVATE}."}]
_ANSWER = {"temperature": 0, "seed": 1}


@dataclass(frozen=True, slots=True)
class Route:
    """A route with a body that it answers, and the model whose fields that body may have."""

    path: str
    body: Mapping[str, Any]
    model: type[BaseModel] | None


ROUTES = (
    Route(
        "/v1/chat/completions",
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 3, **_ANSWER},
        ChatCompletionRequest,
    ),
    Route(
        "/v1/completions",
        {"model": MODEL, "prompt": PRIVATE, "max_tokens": 3, **_ANSWER},
        CompletionRequest,
    ),
    Route(
        "/v1/responses",
        {"model": MODEL, "input": f"Say {PRIVATE}.", "max_output_tokens": 3, **_ANSWER},
        ResponsesRequest,
    ),
    Route(
        "/v1/messages",
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 3, "temperature": 0},
        AnthropicMessagesRequest,
    ),
    Route(
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": _MESSAGES},
        AnthropicCountTokensRequest,
    ),
    Route("/tokenize", {"model": MODEL, "prompt": PRIVATE}, None),
    Route("/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}, None),
)

# Fields of the two routes that share one model of many shapes.
_OF_TOKENIZERS = (
    *("prompt", "messages", "tokens", "add_special_tokens", "add_generation_prompt"),
    *("return_token_strs", "continue_final_message", "chat_template", "chat_template_kwargs"),
    *("mm_processor_kwargs", "tools", "media_io_kwargs"),
)
# Within which each kind of structured output is a field of its own.
_WITHIN = {"structured_outputs": tuple(StructuredOutputsParams.__dataclass_fields__)}
# Fields of nobody, and of other servers.
_OF_NOBODY = ("", "\u0000", "__proto__", "best_of", "guided_json", "slicewise_emitted_token_ids")

_DEEP = "[" * 2000 + "]" * 2000
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}

# What answers are made by, in two of which a request may be odd at once.
_PAIRED = frozenset(
    (
        *("echo", "frequency_penalty", "ignore_eos", "include_reasoning", "logit_bias", "logprobs"),
        *("include_stop_str_in_output", "length_penalty", "max_completion_tokens", "max_tokens"),
        *("max_output_tokens", "min_p", "min_tokens", "n", "parallel_tool_calls", "metadata"),
        *("presence_penalty", "prompt_logprobs", "reasoning_effort", "repetition_detection"),
        *("repetition_penalty", "response_format", "return_token_ids", "return_token_offsets"),
        *("return_tokens_as_token_ids", "seed", "skip_special_tokens", "stop", "stop_token_ids"),
        *("spaces_between_special_tokens", "stream_interval", "stream_options", "temperature"),
        *("thinking", "thinking_token_budget", "tool_choice", "tools", "top_k", "top_logprobs"),
        *("top_p", "truncate_prompt_tokens", "truncation", "user", "bad_words", "cache_salt"),
        *("allowed_token_ids", "instructions", "system", "stop_sequences", "text", "suffix"),
        *("structured_outputs.json", "structured_outputs.regex", "structured_outputs.choice"),
        *("structured_outputs.grammar", "structured_outputs.json_object", "logprob_token_ids"),
    )
)

# JSON text. What is no JSON, as NaN, is read by some parsers all the same.
VALUES: tuple[str, ...] = (
    *("null", "true", "false"),
    *("0", "1", "-1", "2", "5", "0.5", "-0.5", "1e-9", "5e-324", "1e308", "-1e308", "1e400"),
    *("127", "100000", "2147483647", "2147483648", "-2147483649"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 400),
    *("NaN", "Infinity", "-Infinity"),
    *('""', '"a"', '" "', '"0"', '"none"', '"auto"', '"required"', '"\\u0000"', '"\\ud800"'),
    json.dumps(PRIVATE),
    json.dumps([PRIVATE]),
    json.dumps({PRIVATE: PRIVATE}),
    json.dumps("é" * 5000),
    json.dumps("(a+)+$"),
    json.dumps("(" * 500),
    json.dumps("root ::= root"),
    json.dumps('root ::= "a" | "b"'),
    json.dumps(json.dumps(_SCHEMA)),
    *("[]", "[[]]", "[null]", "[0]", "[-1]", "[1, 2, 3]", "[2147483648]", "[511]", "[1000000]"),
    *('[""]', '["a"]', '["\\u0000"]', '["a", "a"]', "[1.5]", "[[1, 2], [3]]", "[{}]"),
    json.dumps(list(range(200))),
    json.dumps([f"choice {number}" for number in range(50)]),
    _DEEP,
    *("{}", '{"": null}', '{"a": 1}', '{"0": 100}', '{"-1": 1}', '{"999999": 1}', '{"5": 1e308}'),
    *('{"type": "text"}', '{"type": "json_object"}', '{"type": "structural_tag"}'),
    json.dumps({"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}),
    json.dumps({"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}),
    json.dumps({"type": "function", "function": {"name": "a"}}),
    json.dumps([{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#"}}}]),
    json.dumps({"include_usage": True, "continuous_usage_stats": True}),
    json.dumps({"slicewise_emitted_token_ids": [5]}),
    json.dumps({"do_remote_prefill": True, "remote_engine_id": "a"}),
    json.dumps({"enabled": True, "type": "enabled", "budget_tokens": 1024}),
    json.dumps({"max_pattern_size": 2147483648, "min_pattern_size": 1, "min_count": 2}),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `field` has a dot before a field within another. `others` are changed too."""

    path: str
    field: str
    value: str
    is_streamed: bool = False
    others: tuple[tuple[str, str], ...] = ()

    @property
    def route(self) -> Route:
        """Where it is sent."""
        return next(route for route in ROUTES if route.path == self.path)

    @property
    def is_read_by_vllm(self) -> bool:
        """Whether vLLM's model of requests has no objection: what is wrong is found deeper."""
        if self.route.model is None:
            return False
        try:
            self.route.model.model_validate_json(self.text())
        # Some of its validators fail where they should refuse.
        except (ValidationError, ValueError, TypeError, AttributeError, VLLMClientError):
            return False
        return True

    def text(self) -> bytes:
        """Returns its body."""
        body = {name: json.dumps(value) for name, value in self.route.body.items()}
        if self.is_streamed:
            body["stream"] = "true"
        for field, value in ((self.field, self.value), *self.others):
            outer, _, inner = field.partition(".")
            body[outer] = f"{{{json.dumps(inner)}: {value}}}" if inner else value
        fields = ", ".join(f"{json.dumps(name)}: {value}" for name, value in body.items())
        return f"{{{fields}}}".encode()

    def __str__(self) -> str:
        """Returns a line that names it."""
        kind = " streamed" if self.is_streamed else ""
        fields = ((self.field, self.value), *self.others)
        return f"{self.path}{kind} " + " ".join(f"{name}={value[:80]}" for name, value in fields)


def _fields_of(route: Route) -> Iterator[str]:
    names = _OF_TOKENIZERS if route.model is None else tuple(route.model.model_fields)
    yield from sorted({*names, *route.body})
    for outer in _WITHIN.keys() & set(names):
        yield from (f"{outer}.{inner}" for inner in _WITHIN[outer])
    yield from _OF_NOBODY


def can_stream(route: Route) -> bool:
    """Returns whether the route answers with tokens, an engine's."""
    return "max_tokens" in route.body or "max_output_tokens" in route.body


def every_case() -> list[Case]:
    """Returns every (route, field, value), half of those that can stream as streams."""
    cases = []
    for route in ROUTES:
        for field in _fields_of(route):
            for number, value in enumerate(VALUES):
                is_streamed = can_stream(route) and field != "stream" and bool(number % 2)
                cases.append(Case(route.path, field, value, is_streamed))
    return cases


def some_cases(count: int, seed: int) -> Sequence[Case]:
    """Returns `count` of them, the same for the same seed."""
    return random.Random(seed).sample(every_case(), count)


def paired_cases(count: int, seed: int) -> list[Case]:
    """Returns `count` requests with two odd fields that vLLM reads, the same for the same seed.

    Of single values most are of a wrong type and come to no engine; these come further. Their
    routes answer with tokens.
    """
    read: dict[str, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for each in every_case():
        if can_stream(each.route) and each.field in _PAIRED and each.is_read_by_vllm:
            read[each.path][each.field].append(each)
    chance, found = random.Random(seed), list[Case]()
    while len(found) < count:
        # By field first: some have many values that are read, and refused a little deeper.
        fields = read[chance.choice(list(read))]
        one, other = (chance.choice(fields[name]) for name in chance.sample(list(fields), 2))
        pair = replace(one, others=((other.field, other.value),))
        if pair.is_read_by_vllm:
            found.append(pair)
    return found
