"""Requests of which one field has a value that no polite client sends, all else being valid.

The fields are those of vLLM's own request models, so that a new vLLM's fields are tried too. The
values are JSON text: some are no value of Python's, or no JSON at all.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import StructuredOutputsParams

MODEL = "slicewise-demo"
_MESSAGES = [{"role": "user", "content": "Say a word."}]
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
        {"model": MODEL, "prompt": "Once", "max_tokens": 3, **_ANSWER},
        CompletionRequest,
    ),
    Route(
        "/v1/responses",
        {"model": MODEL, "input": "Say a word.", "max_output_tokens": 3, **_ANSWER},
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
    Route("/tokenize", {"model": MODEL, "prompt": "Once"}, None),
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

# JSON text. What is no JSON, as NaN, is read by some parsers all the same.
VALUES: tuple[str, ...] = (
    *("null", "true", "false"),
    *("0", "1", "-1", "2", "5", "0.5", "-0.5", "1e-9", "5e-324", "1e308", "-1e308", "1e400"),
    *("127", "100000", "2147483647", "2147483648", "-2147483649"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 400),
    *("NaN", "Infinity", "-Infinity"),
    *('""', '"a"', '" "', '"0"', '"none"', '"auto"', '"required"', '"\\u0000"', '"\\ud800"'),
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
    """One request. `field` has a dot before a field within another."""

    path: str
    field: str
    value: str
    is_streamed: bool = False

    def text(self) -> bytes:
        """Returns its body."""
        (route,) = (route for route in ROUTES if route.path == self.path)
        body = {name: json.dumps(value) for name, value in route.body.items()}
        if self.is_streamed:
            body["stream"] = "true"
        outer, _, inner = self.field.partition(".")
        body[outer] = f"{{{json.dumps(inner)}: {self.value}}}" if inner else self.value
        fields = ", ".join(f"{json.dumps(name)}: {value}" for name, value in body.items())
        return f"{{{fields}}}".encode()

    def __str__(self) -> str:
        """Returns a line that names it."""
        kind = " streamed" if self.is_streamed else ""
        return f"{self.path}{kind} {self.field}={self.value[:80]}"


def _fields_of(route: Route) -> Iterator[str]:
    names = _OF_TOKENIZERS if route.model is None else tuple(route.model.model_fields)
    yield from sorted({*names, *route.body})
    for outer in _WITHIN.keys() & set(names):
        yield from (f"{outer}.{inner}" for inner in _WITHIN[outer])
    yield from _OF_NOBODY


def every_case() -> list[Case]:
    """Returns every (route, field, value), half of those that can stream as streams."""
    cases = []
    for route in ROUTES:
        can_stream = "max_tokens" in route.body or "max_output_tokens" in route.body
        for field in _fields_of(route):
            for number, value in enumerate(VALUES):
                is_streamed = can_stream and field != "stream" and bool(number % 2)
                cases.append(Case(route.path, field, value, is_streamed))
    return cases


def some_cases(count: int, seed: int) -> Sequence[Case]:
    """Returns `count` of them, the same for the same seed."""
    return random.Random(seed).sample(every_case(), count)
