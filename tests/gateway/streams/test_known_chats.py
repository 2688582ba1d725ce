"""Chats of known forms are answered past vLLM as vLLM answers them, whatever was asked.

vLLM's frontend is the real one, behind the real edge; the engine is scripted. The same request goes
over HTTP three times, where the third is of a known form, and by ASGI alone, where none can be.
"""

import asyncio
from typing import Any

import pytest

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.gateway.model_version import ModelVersion
from tests.gateway.engines import ScriptedLink
from tests.gateway.test_failed_after_admission import OneVersion, Streamed
from tests.gateway.test_forged_resume import CONFIG, DEADLINE_S, MODEL
from tests.gateway.test_http_edge import edge_over

from .over_http import HttpStream, events_in, http_server, joined, without_names
from .test_plain_streams import CHAT, MESSAGES, PARSERS, TOOL, USAGE

pytestmark = pytest.mark.imports_vllm

TOOLS_ONLY = ModelConfig.model_validate(
    CONFIG.model_dump(mode="json") | {"frontend_args": dict(PARSERS.frontend_args)}
)


def short(config: ModelConfig) -> ModelConfig:
    """The same with a short context: an answer that fills it is over soon."""
    given = config.model_dump(mode="json")
    return ModelConfig.model_validate(
        given | {"engine_args": given["engine_args"] | {"max_model_len": 160}}
    )


def configs(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """All kinds of parsers; one of tools alone, which is neither of the others, has `marks`."""
    return pytest.mark.parametrize(
        "config",
        [
            pytest.param(short(CONFIG), id="no-parsers"),
            pytest.param(short(TOOLS_ONLY), id="parser-of-tools", marks=marks),
            pytest.param(short(PARSERS), id="shipped-parsers"),
        ],
    )


OTHER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And a host? é"}]
KNOWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": {"stream_options": USAGE},
    "one-token": {"max_tokens": 1},
    "one-token-usage": {"max_tokens": 1, "stream_options": USAGE},
    "as-many-as-fit": {"max_tokens": None},
    "completion-tokens": {"max_completion_tokens": 7, "max_tokens": None},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 7, "min_p": 0.1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "stop-token": {"stop_token_ids": [5]},
    "special-tokens": {"skip_special_tokens": False},
    "user": {"user": "somebody"},
    "one-answer": {"n": 1, "logprobs": False},
}
NOT_KNOWN: dict[str, dict[str, Any]] = {
    "n": {"n": 2, "temperature": 1.0},
    "stop": {"stop": ["zq"]},
    "continuous-usage": {"stream_options": USAGE | {"continuous_usage_stats": True}},
    "token-ids": {"return_token_ids": True},
    "tail-of-the-prompt": {"truncate_prompt_tokens": 8},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "A slice?"}]}]},
    "named": {"messages": [{"role": "user", "name": "x", "content": "What is a slice?"}]},
}


class Fleet:
    """One model behind an edge, on a scripted engine."""

    def __init__(self, version: ModelVersion) -> None:
        self.version = version
        self.link = ScriptedLink(version.dispatcher)
        self.edge = edge_over(OneVersion(version))

    async def over_http(self, port: int, body: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """The events of an answer, and whether it was one of a known form."""
        stream = HttpStream(port, CHAT, body)
        was_known = await self._answered(stream)
        await stream.task
        return stream.events, was_known

    async def by_vllm(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        stream = Streamed(self.edge, CHAT, body)
        assert not await self._answered(stream)
        return events_in(stream.chunks)

    async def _answered(self, answer: HttpStream | Streamed) -> bool:
        was_known = False
        async with asyncio.timeout(DEADLINE_S):
            while not answer.task.done():
                was_known |= self.version.client.num_known > 0
                if self.link.running:
                    self.link.step()
                # A step is on its way: through the server, vLLM and the client.
                for _ in range(20):
                    await asyncio.sleep(0)
        return was_known

    def close(self) -> None:
        """Nothing is left of what was asked."""
        assert (self.version.client.num_direct, self.version.llm.num_in_flight) == (0, 0)
        assert self.version.dispatcher.num_in_flight == 0
        self.version.llm.shutdown()


async def fleet_of(config: ModelConfig, hold_s: float = 0.0) -> Fleet:
    gateway = GatewayConfig(min_hold_s=hold_s, max_hold_s=hold_s)
    return Fleet(await ModelVersion.build(config, gateway))


def body_of(options: dict[str, Any], messages: list[dict[str, Any]] = MESSAGES) -> dict[str, Any]:
    asked = {"model": MODEL, "stream": True, "messages": messages, "max_tokens": 24} | options
    return {name: value for name, value in asked.items() if value is not None}


@pytest.mark.parametrize("name", KNOWN)
@configs(pytest.mark.long)
async def test_answer_of_a_known_form_is_vllms(config: ModelConfig, name: str) -> None:
    fleet = await fleet_of(config)
    first, second = body_of(KNOWN[name]), body_of(KNOWN[name], OTHER)
    async with http_server(fleet.edge) as port:
        for _ in range(2):
            learned, was_known = await fleet.over_http(port, first)
            assert not was_known
        known, was_known = await fleet.over_http(port, second)
        assert was_known
    assert without_names(learned) == without_names(await fleet.by_vllm(first))
    assert without_names(known) == without_names(await fleet.by_vllm(second))
    fleet.close()


async def test_prompt_of_a_known_form_is_made_past_vllms_renderer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await fleet_of(CONFIG)
    rendered: list[Any] = []
    renderer = fleet.version.llm.renderer
    render = renderer.render_messages

    def seen(*args: Any, **named: Any) -> Any:
        rendered.append(args[0])
        return render(*args, **named)

    monkeypatch.setattr(renderer, "render_messages", seen)
    async with http_server(fleet.edge) as port:
        for count in (1, 1, 0, 0):
            await fleet.over_http(port, body_of({}, OTHER))
            assert [each for each in rendered if each == OTHER] == [OTHER] * count
            rendered.clear()
    fleet.close()


@configs()
@pytest.mark.parametrize("name", ["plain", "usage"])
async def test_held_answer_of_a_known_form_is_vllms_once_joined(
    config: ModelConfig, name: str
) -> None:
    fleet = await fleet_of(config, hold_s=0.02)
    body = body_of(KNOWN[name])
    async with http_server(fleet.edge) as port:
        for _ in range(2):
            await fleet.over_http(port, body)
        known, was_known = await fleet.over_http(port, body)
    assert was_known
    ours, vllms = joined(known), joined(await fleet.by_vllm(body))
    forms, of_vllm = set(ours.pop("forms")), set(vllms.pop("forms"))
    assert forms <= of_vllm or of_vllm <= forms
    assert ours == vllms
    fleet.close()


@pytest.mark.parametrize("name", NOT_KNOWN)
async def test_form_that_is_more_than_text_never_becomes_known(name: str) -> None:
    fleet = await fleet_of(CONFIG)
    body = body_of(NOT_KNOWN[name])
    async with http_server(fleet.edge) as port:
        for _ in range(3):
            events, was_known = await fleet.over_http(port, body)
            assert not was_known
    assert joined(events) == joined(await fleet.by_vllm(body))
    fleet.close()


async def test_model_that_thinks_takes_vllms_way() -> None:
    fleet = await fleet_of(PARSERS)
    body = body_of({"chat_template_kwargs": {"enable_thinking": True}})
    async with http_server(fleet.edge) as port:
        for _ in range(3):
            events, was_known = await fleet.over_http(port, body)
            assert not was_known
    assert any("reasoning" in str(event) for event in events)
    fleet.close()


async def test_tools_are_another_form_which_is_not_known() -> None:
    fleet = await fleet_of(PARSERS)
    plain, with_tools = body_of({}), body_of({"tools": [TOOL], "tool_choice": "auto"})
    async with http_server(fleet.edge) as port:
        for _ in range(2):
            await fleet.over_http(port, plain)
            assert not (await fleet.over_http(port, with_tools))[1]
        assert (await fleet.over_http(port, plain))[1]
    fleet.close()


async def test_forms_that_come_once_leave_those_that_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.gateway.streams.known.chats.MOST_FORMS", 2)
    fleet = await fleet_of(CONFIG)
    body = body_of({"max_tokens": 2})
    async with http_server(fleet.edge) as port:
        for _ in range(2):
            await fleet.over_http(port, body)
        for seed in range(5):
            assert not (await fleet.over_http(port, body_of({"seed": seed})))[1]
        assert (await fleet.over_http(port, body))[1]
    fleet.close()
