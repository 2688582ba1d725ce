"""Large bodies are read and rendered in forks, and asked and answered as any other.

vLLM's own frontend over a scripted engine. A body becomes large by spaces between its fields, so
that the same request can be sent short.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import ASGIApp

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.edge.fields import is_large
from serving.gateway.forks.bodies.prepared_app import PreparedApp
from serving.gateway.forks.bodies.sizes import LARGE_BYTES, LARGE_VALUES, MOST_VALUES_LEFT
from serving.gateway.forks.messages import ForkLimits
from serving.gateway.forks.server import ForkServer
from serving.gateway.forks.version_spec import TASKS, VersionSpec
from serving.gateway.model_version import ModelVersion
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import decode_request, request_decoder

from .engines import ScriptedLink, let_token_leave
from .test_failed_after_admission import OneVersion
from .test_http_edge import EchoFrontend, edge_over

pytestmark = [pytest.mark.imports_vllm, pytest.mark.process, pytest.mark.slow]

DEADLINE_S = 120.0
MODEL = "demo"
MAX_BODY_BYTES = 32 * 1024 * 1024
CONFIG = {
    "name": MODEL,
    "source": "models/slicewise-demo",
    "engine_args": {
        "dtype": "float32",
        "max_model_len": 4096,
        "structured_outputs_config": {"reasoning_parser": "qwen3", "backend": "xgrammar"},
    },
    "deployments": [{"compute_class": "local"}],
    "frontend_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is a slice? \u2028 é \U0001f600"}]},
    {"role": "assistant", "content": "Chips that are joined. " * 8},
    {"role": "user", "content": "And a host?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts chips.",
        "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
    },
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": TALK}),
    "chat-stream-usage": (
        CHAT,
        {"messages": TALK, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-echo": (
        CHAT,
        {
            "messages": TALK[:3],
            "echo": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "stream": True,
        },
    ),
    "chat-several": (CHAT, {"messages": TALK, "n": 3, "seed": 7, "stop": ["never"]}),
    "chat-tools": (CHAT, {"messages": TALK, "tools": [TOOL], "tool_choice": "auto"}),
    "chat-tool-answer": (
        CHAT,
        {
            "messages": [
                *TALK,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "count", "arguments": '{"of": "v6e"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "8"},
            ],
            "tools": [TOOL],
        },
    ),
    "chat-not-thinking": (
        CHAT,
        {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}, "stream": True},
    ),
    "chat-schema": (
        CHAT,
        {"messages": TALK, "response_format": {"type": "json_object"}},
    ),
    "prompt": (COMPLETIONS, {"prompt": "A slice is", "echo": True}),
    "prompts": (COMPLETIONS, {"prompt": ["A slice is", "A host is"], "n": 2}),
    "prompt-ids": (COMPLETIONS, {"prompt": [5, 6, 7], "stream": True}),
    "prompts-ids": (COMPLETIONS, {"prompt": [[5, 6, 7], [8]], "return_token_ids": True}),
    "responses": (RESPONSES, {"input": "What is a slice?", "instructions": "Be brief. " * 20}),
    "responses-items": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "What is a slice?"},
                {
                    "type": "message",
                    "id": "m1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Chips. " * 30, "annotations": []}],
                },
                {"role": "user", "content": "And a host?"},
            ],
            "stream": True,
        },
    ),
    "responses-goes-on": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "What is a slice?"},
                {
                    "type": "message",
                    "id": "m1",
                    "status": "incomplete",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Chips. " * 30, "annotations": []}],
                },
            ],
        },
    ),
    "messages": (MESSAGES, {"messages": TALK[1:], "system": "Be brief. " * 20}),
    "messages-stream": (MESSAGES, {"messages": TALK[1:], "stream": True}),
    "messages-tools": (
        MESSAGES,
        {
            "messages": TALK[1:],
            "tools": [{"name": "count", "input_schema": TOOL["function"]["parameters"]}],
        },
    ),
    # What is answered without an engine.
    "tokenize": ("/tokenize", {"prompt": "A slice is"}),
    "tokenize-chat": ("/tokenize", {"messages": TALK}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7]}),
    "count-tokens": ("/v1/messages/count_tokens", {"messages": TALK[1:]}),
    # What is refused.
    "too-long": (COMPLETIONS, {"prompt": [5] * 5000}),
    "no-such-token": (COMPLETIONS, {"prompt": [10**6]}),
    "no-messages": (CHAT, {"messages": "none"}),
    "no-such-role": (MESSAGES, {"messages": [{"role": "judge", "content": "a"}]}),
    "late-refusal": (RESPONSES, {"input": "a", "stream": True, "temperature": -1}),
    "own-template": (CHAT, {"messages": TALK, "chat_template": "{{ messages }}"}),
    "steering": (CHAT, {"messages": TALK, "priority": 5}),
    "too-many": (COMPLETIONS, {"prompt": ["a"] * 129}),
}
LIMIT = {RESPONSES: "max_output_tokens"}
# Made anew for each answer.
_MADE = re.compile(
    r'"(id|item_id|response_id|created|created_at|completed_at|signature|system_fingerprint)": ?'
    r'("[^"]*"|\d+)'
)


def sent_as(kind: str) -> tuple[str, dict[str, Any]]:
    path, fields = KINDS[kind]
    limit = {LIMIT.get(path, "max_tokens"): 6} if path.startswith("/v1/") else {}
    if path.endswith("count_tokens"):
        limit = {}
    return path, {"model": MODEL, **limit, **fields}


def large(body: dict[str, Any]) -> bytes:
    text = json.dumps(body)
    return (text[:-1] + " " * LARGE_BYTES + "}").encode()


class OneApp(EchoFrontend):
    """A model with this application."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(MODEL)
        self._app = app

    async def enter(self, target: RequestTarget) -> ASGIApp:
        return self._app


@dataclass
class Served:
    """A model behind the edge of a gateway, over an engine that goes on by itself."""

    runner: asyncio.Runner
    version: ModelVersion
    edge: ASGIApp
    link: ScriptedLink

    def ask(self, path: str, body: bytes) -> tuple[httpx.Response, list[TokenRequest]]:
        """Returns the answer, and what the engine got."""
        return self.runner.run(self._asked(path, body))

    async def _asked(self, path: str, body: bytes) -> tuple[httpx.Response, list[TokenRequest]]:
        before = len(self.link.submitted)
        transport = httpx.ASGITransport(self.edge)
        headers = {"X-Request-Id": "the-same", "Content-Type": "application/json"}
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        ):
            asked = asyncio.create_task(client.post(path, content=body, headers=headers))
            while not asked.done():
                self.link.step()
                await let_token_leave()
                await asyncio.sleep(0.002)
            return await asked, self.link.submitted[before:]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as runner:
        version = runner.run(
            ModelVersion.build(ModelConfig.model_validate(CONFIG), GatewayConfig(max_hold_s=0.0))
        )
        link = ScriptedLink(version.dispatcher)
        link.max_prompt_tokens = 1_000_000
        edge = edge_over(OneVersion(version), max_body_bytes=MAX_BODY_BYTES, max_sequences=128)
        yield Served(runner, version, edge, link)
        edge.close()
        runner.run(version.wait_closed())


def without_made(answer: httpx.Response) -> str:
    return _MADE.sub(r'"\1":0', answer.text)


def on_the_link(requests: list[TokenRequest]) -> list[Any]:
    """What an engine decodes, but for ids and times."""
    found = []
    for request in requests:
        arrived = decode_request(request, request_decoder())
        params = arrived.sampling_params
        found.append((request.prompt_token_ids, request.max_tokens, repr(params)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_large_body_is_asked_and_answered_as_the_same_one_short(served: Served, kind: str) -> None:
    path, body = sent_as(kind)
    short, on_short = served.ask(path, json.dumps(body).encode())
    long, on_long = served.ask(path, large(body))
    assert on_the_link(on_long) == on_the_link(on_short)
    assert long.status_code == short.status_code
    assert without_made(long) == without_made(short)
    assert long.headers.get("content-type") == short.headers.get("content-type")
    assert served.version.llm.num_in_flight == 0
    if short.status_code == 200 and path.startswith("/v1/") and "count" not in path:
        assert on_short, "the test has not reached an engine"


def test_prompt_of_a_megabyte_reaches_the_engine_whole(served: Served) -> None:
    """In token ids, of which the model takes fewer: it is refused after all of them were read."""
    answer, _ = served.ask(
        COMPLETIONS, json.dumps({"model": MODEL, "prompt": [7] * 400_000}).encode()
    )
    assert answer.status_code == 400
    assert "400000" in answer.text or "400,000" in answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": [{"role": "user", "content": ""}] * 300}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2000}]}),
    ],
    ids=["items", "parts"],
)
def test_many_items_are_read_apart_however_short_the_body_is(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({"model": MODEL, LIMIT.get(path, "max_tokens"): 4, **fields}).encode()
    assert len(body) < LARGE_BYTES
    assert is_large(path, body)
    answer, requests = served.ask(path, body)
    assert answer.status_code == 200, answer.text
    assert len(requests) == 1
    assert len(requests[0].prompt_token_ids) > 300


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"odd": [[]] * (MOST_VALUES_LEFT + 1)}, "odd"),
        ({"odd": "x" * 300_000}, "odd"),
        ({"metadata": {"of": "x" * 300_000}}, "metadata"),
    ],
)
def test_what_is_not_the_prompt_may_not_be_large(
    served: Served, fields: dict[str, Any], named: str
) -> None:
    answer, requests = served.ask(CHAT, large({"model": MODEL, "messages": TALK, **fields}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == named
    assert "allowed: 262,144 and 20,000" in answer.json()["error"]["message"]
    assert not requests


@pytest.mark.parametrize(
    "text",
    ["[" * 1_000_000, '{"model": "demo", "prompt": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}"],
    ids=["broken", "nested"],
)
def test_body_that_is_no_json_or_nested_without_end_is_refused(served: Served, text: str) -> None:
    answer, requests = served.ask(COMPLETIONS, text.encode())
    assert answer.status_code == 400, answer.text
    assert not requests


def test_body_of_millions_of_values_is_ended_and_the_next_one_is_served(served: Served) -> None:
    odd = ",".join(['{"a":[{}]}'] * 1_400_000)
    answer, _ = served.ask(
        CHAT, f'{{"model": "demo", "messages": [], "metadata": [{odd}]}}'.encode()
    )
    assert answer.status_code == 400
    path, body = sent_as("chat")
    answer, requests = served.ask(path, large(body))
    assert (answer.status_code, len(requests)) == (200, 1)


def test_body_short_of_values_is_read_at_once(served: Served) -> None:
    path, body = sent_as("chat")
    served.ask(path, large(body))
    pid = served.version.fork_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        body["odd"] = [[]] * (LARGE_VALUES - 50)
        answer, _ = served.ask(path, json.dumps(body).encode())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def trusting(served: Served) -> Iterator[ForkServer]:
    """A fork server of a version that renders clients' chat templates."""
    spec = msgspec.msgpack.decode(served.version.fork_spec(), type=VersionSpec)
    trusted = {**spec.frontend_args, "trust_request_chat_template": True}
    changed = msgspec.structs.replace(spec, frontend_args=trusted)
    forks = ForkServer(MODEL, TASKS, lambda: msgspec.msgpack.encode(changed))
    yield forks
    served.runner.run(forks.wait_closed())


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}a{% endfor %}{% endfor %}",
            "1 s of",
        ),
        ("{{ 'a' * 9999999999 }}", "cannot be read within"),
        ("{{ messages.__class__.__mro__ }}", None),
    ],
    ids=["time", "memory", "escape"],
)
def test_chat_template_of_a_client_is_rendered_in_a_fork_that_may_die_of_it(
    served: Served, trusting: ForkServer, template: str, words: str | None
) -> None:
    limits = ForkLimits(cpu_s=1, wall_s=20.0, memory_bytes=1024 * 1024 * 1024)

    async def never(*_: Any) -> None:
        raise AssertionError("it was handed on")

    edge = edge_over(OneApp(PreparedApp(never, trusting, served.version.body_judge, limits)))
    path, body = sent_as("chat")
    body["chat_template"] = template
    asking = replace(served, edge=edge)
    answer, requests = asking.ask(path, json.dumps(body).encode())
    assert answer.status_code == 400, answer.text
    assert not requests
    assert words is None or words in answer.text
