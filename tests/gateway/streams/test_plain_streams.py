"""Streams that are written past vLLM are what vLLM would have written, whatever was asked.

vLLM's frontend is the real one, behind the real edge; the engine is scripted. The same request goes
over HTTP, where plain streams are written past vLLM, and by ASGI alone, where none can be.
"""

import asyncio
from typing import Any

import pytest
from starlette.datastructures import State

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams.plain import write_plain_past
from tests.gateway.engines import ScriptedLink
from tests.gateway.test_failed_after_admission import OneVersion, Streamed
from tests.gateway.test_forged_resume import CONFIG, DEADLINE_S, MODEL
from tests.gateway.test_http_edge import edge_over

from .over_http import HttpStream, events_in, http_server, joined, without_names

pytestmark = pytest.mark.imports_vllm

MESSAGES = [{"role": "user", "content": "What is a slice?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# As the shipped configuration has it.
PARSERS = ModelConfig.model_validate(
    CONFIG.model_dump(mode="json")
    | {
        "engine_args": {"structured_outputs_config": {"reasoning_parser": "qwen3"}},
        "frontend_args": {
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "default_chat_template_kwargs": {"enable_thinking": False},
        },
    }
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USAGE = {"include_usage": True}


def chat(**options: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 24} | options


def completion(**options: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "A slice is", "max_tokens": 24} | options


PLAIN = {
    "chat": chat(),
    "chat-usage": chat(stream_options=USAGE),
    "chat-special-tokens": chat(skip_special_tokens=False),
    "chat-prompt-text": chat(return_prompt_text=True),
    "completion": completion(),
    "completion-usage": completion(stream_options=USAGE),
    "completion-echo": completion(echo=True),
    "completion-seed": completion(seed=7, temperature=0.9),
    "completion-stop-token": completion(stop_token_ids=[5]),
}
SLOW = {
    "chat-one-token": chat(max_tokens=1),
    "chat-n": chat(n=2, temperature=1.0),
    "chat-stop": chat(stop=["zq"]),
    "chat-continuous-usage": chat(stream_options=USAGE | {"continuous_usage_stats": True}),
    "chat-token-ids": chat(return_token_ids=True),
    "chat-interval": chat(stream_interval=3),
    "chat-echo": chat(echo=True, add_generation_prompt=False),
    "chat-negative": chat(max_tokens=-1),
    "completion-two-prompts": completion(prompt=["A slice is", "A host is"]),
    "completion-n": completion(n=2, temperature=1.0),
    "completion-stop": completion(stop=["e"]),
    "completion-token-ids": completion(return_token_ids=True),
    "completion-spaces": completion(skip_special_tokens=False, spaces_between_special_tokens=False),
}


async def answered(
    version: ModelVersion, link: ScriptedLink, answer: HttpStream | Streamed
) -> list[bool]:
    """Steps the engine until the stream is whole; whether it was direct, at each step."""
    was_direct = []
    async with asyncio.timeout(DEADLINE_S):
        while not answer.task.done():
            if link.running:
                link.step()
            # A step is on its way: through the server, vLLM and the client.
            for _ in range(20):
                await asyncio.sleep(0)
            was_direct.append(version.client.num_direct > 0)
    return was_direct


async def both_ways(
    config: ModelConfig, asked: tuple[str, dict[str, Any]], gateway: GatewayConfig | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """The events past vLLM and from vLLM, and whether any were written past it."""
    version = await ModelVersion.build(config, gateway or GatewayConfig(max_hold_s=0.0))
    link = ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    path, body = asked
    body = {"model": MODEL, "stream": True, **body}
    async with http_server(edge) as port:
        direct = HttpStream(port, path, body)
        was_direct = await answered(version, link, direct)
        if not direct.task.exception():
            await direct.task
    usual = Streamed(edge, path, body)
    assert not any(await answered(version, link, usual))
    assert (version.client.num_direct, version.llm.num_in_flight) == (0, 0)
    version.llm.shutdown()
    return direct.events, events_in(usual.chunks), any(was_direct)


@pytest.mark.parametrize("asked", PLAIN.values(), ids=PLAIN)
async def test_plain_stream_is_vllms_chunk_by_chunk(asked: tuple[str, dict[str, Any]]) -> None:
    direct, usual, was_direct = await both_ways(CONFIG, asked)
    assert was_direct
    assert len(usual) >= 24
    assert without_names(direct) == without_names(usual)


# What is not plain is vLLM's either way: without parsers it is a long test.
@pytest.mark.parametrize(
    ("config", "name"),
    [
        *(pytest.param(PARSERS, name, id=f"shipped-parsers-{name}") for name in (*PLAIN, *SLOW)),
        *(pytest.param(CONFIG, name, id=f"no-parsers-{name}") for name in PLAIN),
        *(
            pytest.param(CONFIG, name, id=f"no-parsers-{name}", marks=pytest.mark.long)
            for name in SLOW
        ),
    ],
)
async def test_held_stream_is_vllms_once_its_text_is_joined(config: ModelConfig, name: str) -> None:
    asked = (PLAIN | SLOW)[name]
    forced = GatewayConfig(min_hold_s=0.02, max_hold_s=0.02)
    direct, usual, was_direct = await both_ways(config, asked, forced)
    assert was_direct == (name in PLAIN)
    ours, vllms = joined(direct), joined(usual)
    # On a busy machine all but the first token may leave with the end.
    forms, of_vllm = set(ours.pop("forms")), set(vllms.pop("forms"))
    assert forms <= of_vllm or of_vllm <= forms
    assert ours == vllms


async def test_request_with_tools_takes_vllms_way() -> None:
    tools = chat(tools=[TOOL], tool_choice="auto")
    direct, usual, was_direct = await both_ways(PARSERS, tools)
    assert not was_direct
    assert joined(direct) == joined(usual)


async def test_stream_that_thinks_takes_vllms_way() -> None:
    thinks = chat(chat_template_kwargs={"enable_thinking": True}, stream_options=USAGE)
    direct, usual, was_direct = await both_ways(PARSERS, thinks)
    assert not was_direct
    assert joined(direct) == joined(usual)
    assert any("reasoning" in str(event) for event in usual)


def test_application_of_a_pooling_model_has_no_streams_to_write_past() -> None:
    write_plain_past(State())
