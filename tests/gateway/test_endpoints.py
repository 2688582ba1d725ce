"""Chat and completions past FastAPI are answered as FastAPI's way answers them, whatever is asked.

vLLM's frontend is the real one, behind the real edge; the engine is scripted. A content type that
is spelt in another way takes FastAPI's way.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.edge.endpoints import ShortPath
from serving.gateway.forks.bodies.sizes import SHORT_BYTES
from serving.gateway.model_version import ModelVersion
from serving.link.vllm_codec import decode_request, request_decoder

from .engines import ScriptedLink, let_token_leave
from .streams.over_http import events_in, joined
from .streams.test_plain_streams import PARSERS, PLAIN, SLOW, TOOL
from .test_failed_after_admission import OneVersion
from .test_forged_resume import CONFIG, DEADLINE_S, MODEL
from .test_http_edge import client_of, edge_over, post_scope

pytestmark = pytest.mark.imports_vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT, FASTAPI = "application/json", 'application/json; charset="utf-8"'
TEXT = {"role": "user", "content": "What is a slice?"}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no-messages": (CHAT, {}),
    "messages-as-text": (CHAT, {"messages": "What?"}),
    "no-role": (CHAT, {"messages": [{"content": "What?"}]}),
    "wrong-type": (CHAT, {"messages": [TEXT], "temperature": "warm"}),
    "out-of-range": (CHAT, {"messages": [TEXT], "temperature": -1}),
    "top-logprobs": (CHAT, {"messages": [TEXT], "top_logprobs": 3}),
    "tool-choice": (CHAT, {"messages": [TEXT], "tools": [TOOL], "tool_choice": "required"}),
    "too-long": (COMPLETIONS, {"prompt": [5] * 5000}),
    "no-prompt": (COMPLETIONS, {"max_tokens": 1}),
    "empty-prompt": (COMPLETIONS, {"prompt": ""}),
    "unknown-token": (COMPLETIONS, {"prompt": [10**9]}),
    "negative": (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
    "surrogate": (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
    "big-integer": (CHAT, {"messages": [TEXT], "seed": 10**30}),
}
ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown-field": (CHAT, {"messages": [TEXT], "max_tokens": 2, "guided_json": {}}),
    "number-as-text": (CHAT, {"messages": [TEXT], "max_tokens": "2"}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}]}]}),
    "system": (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, TEXT]}),
    "tool-call": (
        CHAT,
        {
            "messages": [
                TEXT,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "four"},
            ]
        },
    ),
    "own-request-id": (CHAT, {"messages": [TEXT], "request_id": "mine"}),
    "token-ids": (COMPLETIONS, {"prompt": [5, 6, 7]}),
    "several-prompts": (COMPLETIONS, {"prompt": ["A", "B"]}),
    "salt": (COMPLETIONS, {"prompt": "A", "cache_salt": "mine"}),
    "truncated": (COMPLETIONS, {"prompt": "A slice is", "truncate_prompt_tokens": 2}),
}


def body_of(fields: dict[str, Any], *, is_stream: bool, num_padding: int = 0) -> bytes:
    asked = {"model": MODEL, "stream": is_stream, "max_tokens": 3, "temperature": 0.7, **fields}
    return json.dumps(asked).encode() + b" " * num_padding


async def until(holds: Callable[[], bool]) -> None:
    """Lets the loop turn until `holds` does."""
    while True:
        if holds():
            return
        await asyncio.sleep(0)


async def answer_of(
    client: httpx.AsyncClient, link: ScriptedLink, path: str, body: bytes, **headers: str
) -> httpx.Response:
    """The answer, while the engine takes a step whenever it has requests."""
    asked = asyncio.create_task(client.post(path, content=body, headers=headers))
    async with asyncio.timeout(DEADLINE_S):
        while not asked.done():
            if link.running:
                link.step()
            await let_token_leave()
    return await asked


def told(answer: httpx.Response) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body without what differs between two equal requests."""
    headers = dict(answer.headers)
    headers.pop("content-length", None)  # ids of other lengths
    if "event-stream" in headers["content-type"] and '"index":1' in answer.text:
        # Whose chunk comes first is left to the order of a set.
        return answer.status_code, headers, joined(events_in([answer.content]))
    lines = [json_without_names(line) for line in answer.text.splitlines()]
    return answer.status_code, headers, lines


def json_without_names(line: str) -> str:
    data = line.removeprefix("data: ")
    if not data.startswith("{"):
        return line
    return json.dumps(json.loads(data) | {"id": "", "created": 0})


async def ways(
    asked: tuple[str, dict[str, Any]], config: ModelConfig, *, is_stream: bool
) -> tuple[Any, Any, list[Any]]:
    """The answers by the short path and by FastAPI's, and what engines got."""
    version = await ModelVersion.build(config, GatewayConfig(max_hold_s=0.0))
    link = ScriptedLink(version.dispatcher)
    path, fields = asked
    body = body_of(fields, is_stream=is_stream)
    same = {"x-request-id": "bench-1"}
    edge = edge_over(OneVersion(version), max_body_bytes=1 << 20)
    async with client_of(edge) as client:
        short = await answer_of(client, link, path, body, **{"content-type": SHORT}, **same)
        usual = await answer_of(client, link, path, body, **{"content-type": FASTAPI}, **same)
    requests = [decode_request(each, request_decoder()) for each in link.submitted]
    for each in requests:
        each.request_id = each.external_req_id = ""
        each.arrival_time = 0.0
    assert version.llm.num_in_flight == 0
    version.llm.shutdown()
    return told(short), told(usual), requests


KINDS = PLAIN | SLOW | ANSWERED
# Options of streams are refused elsewhere.
WHOLE = [name for name, (_, fields) in KINDS.items() if "stream_options" not in fields]


@pytest.mark.parametrize(
    ("name", "is_stream"),
    [*((name, True) for name in KINDS), *((name, False) for name in WHOLE)],
)
async def test_answer_and_engine_request_are_those_of_fastapis_way(
    name: str, is_stream: bool
) -> None:
    asked = KINDS[name]
    short, usual, requests = await ways(asked, CONFIG, is_stream=is_stream)
    assert short == usual
    half = len(requests) // 2
    assert requests[:half] == requests[half:]
    assert half or short[0] >= 400 or '{"error"' in str(short[2])


@pytest.mark.parametrize("name", REFUSED)
async def test_refusal_is_that_of_fastapis_way(name: str) -> None:
    short, usual, requests = await ways(REFUSED[name], CONFIG, is_stream=False)
    assert short == usual
    assert short[0] >= 400
    assert not requests


async def test_tools_are_those_of_fastapis_way() -> None:
    tools = (CHAT, {"messages": [TEXT], "tools": [TOOL], "tool_choice": "auto"})
    for is_stream in (True, False):
        short, usual, _ = await ways(tools, PARSERS, is_stream=is_stream)
        assert short == usual
        assert short[0] == 200


async def test_vllms_application_is_as_we_know_it() -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    app = await version.app()
    assert isinstance(app, FastAPI)
    assert ShortPath(app, app.build_middleware_stack()).routes == {CHAT, COMPLETIONS}
    version.llm.shutdown()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_short_prompt_is_rendered_as_a_long_one(path: str) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    fields = {"messages": [TEXT]} if path == CHAT else {"prompt": ["A slice is", "One host"]}
    async with client_of(edge_over(OneVersion(version), max_body_bytes=1 << 20)) as client:
        for num_padding in (0, SHORT_BYTES):
            body = body_of(fields, is_stream=False, num_padding=num_padding)
            answer = await answer_of(client, link, path, body, **{"content-type": SHORT})
            assert answer.status_code == 200, answer.text
    prompts = [each.prompt_token_ids for each in link.submitted]
    half = len(prompts) // 2
    assert half
    assert prompts[:half] == prompts[half:]
    version.llm.shutdown()


@pytest.mark.parametrize("content_type", [SHORT, FASTAPI])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_client_that_leaves_frees_its_request(content_type: str, is_stream: bool) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    scope = post_scope(CHAT, content_type=content_type)
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
    leaves = asyncio.Event()
    pending = [{"type": "http.request", "body": body_of({"messages": [TEXT]}, is_stream=is_stream)}]
    sent: list[Any] = []

    async def receive() -> Any:
        if pending:
            return pending.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(DEADLINE_S):
        serving = asyncio.create_task(edge(scope, receive, send))
        await until(lambda: bool(link.running))
        leaves.set()
        await serving
        await until(lambda: version.llm.num_in_flight == 0)
    assert (link.running, version.dispatcher.num_in_flight) == ([], 0)
    assert list(edge.metrics.cancellations.values()) == [1]
    assert list(edge.metrics.responses.items()) == [((MODEL, CHAT, "200"), 1)]
    version.llm.shutdown()


async def test_request_that_is_cancelled_from_outside_stays_cancelled() -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    scope = post_scope(CHAT, content_type=SHORT)
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
    body = body_of({"messages": [TEXT]}, is_stream=True)
    async with asyncio.timeout(DEADLINE_S):
        serving = asyncio.create_task(_stays(edge, scope, body))
        await until(lambda: bool(link.running))
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert (link.running, version.llm.num_in_flight) == ([], 0)
    version.llm.shutdown()


async def _stays(edge: Any, scope: dict[str, Any], body: bytes) -> None:
    pending = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        return pending.pop() if pending else await asyncio.get_running_loop().create_future()

    async def send(_message: Any) -> None:
        pass

    await edge(scope, receive, send)
