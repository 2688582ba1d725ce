"""Answers name the tier that a request was served as, wherever vLLM's own types have the field.

The real edge in front of vLLM's own frontend, over a scripted link.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

from serving.config.api_keys import read_keys
from serving.gateway.edge.auth import ApiKeys

from .engines import ScriptedLink
from .test_forged_resume import ROUTES
from .test_separate_tenants import vllm_gateway

pytestmark = pytest.mark.imports_vllm

CHAT, COMPLETIONS, RESPONSES, MESSAGES = ROUTES
NAMING = (CHAT, COMPLETIONS, RESPONSES)
# What is asked for, and what it is served as.
SERVED_AS = {
    None: "default",
    "auto": "default",
    "default": "default",
    "priority": "priority",
    "scale": "priority",
    "flex": "flex",
}


def key_for(*tiers: str) -> ApiKeys:
    return ApiKeys(
        read_keys(json.dumps({"keys": [{"name": "ci", "key": "k", "service_tiers": tiers}]}))
    )


async def ask(
    client: httpx.AsyncClient, link: ScriptedLink, path: str, **fields: Any
) -> httpx.Response:
    """The answer to a request, for which the engine makes steps until it is there."""
    body = {"model": "demo", **ROUTES[path], **fields}
    headers = {"Authorization": "Bearer k"}
    asked = asyncio.create_task(client.post(path, json=body, headers=headers))
    while not asked.done():
        if link.running:
            link.step()
        await asyncio.sleep(0.001)
    return asked.result()


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize("path", NAMING)
async def test_answer_names_the_tier_that_was_asked_for_or_the_keys_own(path: str) -> None:
    async with vllm_gateway(ApiKeys(())) as (version, client):
        link = ScriptedLink(version.dispatcher)
        for asked, served_as in SERVED_AS.items():
            fields = {} if asked is None else {"service_tier": asked}
            answer = await ask(client, link, path, **fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["service_tier"] == served_as


@pytest.mark.parametrize("path", NAMING)
@pytest.mark.parametrize(
    ("tiers", "served_as"),
    [(["flex"], "flex"), (["priority"], "priority"), (["flex", "default"], "default")],
)
async def test_answer_to_what_asks_for_nothing_names_what_its_key_has(
    path: str, tiers: list[str], served_as: str
) -> None:
    async with vllm_gateway(key_for(*tiers)) as (version, client):
        link = ScriptedLink(version.dispatcher)
        for fields in ({}, {"service_tier": "auto"}):
            answer = await ask(client, link, path, **fields)
            assert answer.json()["service_tier"] == served_as


async def test_request_past_no_endpoint_of_ours_is_told_its_tier_too() -> None:
    async with vllm_gateway(ApiKeys(())) as (version, client):
        link = ScriptedLink(version.dispatcher)
        # A spelling for which FastAPI finds the endpoint.
        client.headers["content-type"] = "application/json; charset=latin-1"
        for path in NAMING:
            answer = await ask(client, link, path, service_tier="flex")
            assert answer.json()["service_tier"] == "flex"


async def test_every_record_of_a_streamed_response_names_its_tier() -> None:
    async with vllm_gateway(key_for("flex", "priority")) as (version, client):
        link = ScriptedLink(version.dispatcher)
        for asked, served_as in (("auto", "flex"), ("scale", "priority")):
            answer = await ask(client, link, RESPONSES, stream=True, service_tier=asked)
            told = [event for event in events_of(answer) if "response" in event]
            assert [event["type"] for event in told] == [
                "response.created", "response.in_progress", "response.completed",
            ]  # fmt: skip
            assert {event["response"]["service_tier"] for event in told} == {served_as}


@pytest.mark.parametrize(
    ("path", "chunk"),
    [(CHAT, ChatCompletionStreamResponse), (COMPLETIONS, CompletionStreamResponse)],
)
async def test_chunks_have_the_fields_of_vllms_own_and_no_tier(path: str, chunk: Any) -> None:
    # When vLLM's have one, they are to carry it: `docs/guide/models.md` says that they do not.
    assert "service_tier" not in chunk.model_fields
    async with vllm_gateway(ApiKeys(())) as (version, client):
        link = ScriptedLink(version.dispatcher)
        events = events_of(await ask(client, link, path, stream=True, service_tier="flex"))
        assert events
        assert all(event.keys() <= chunk.model_fields.keys() for event in events)


async def test_anthropics_message_has_no_tier() -> None:
    async with vllm_gateway(ApiKeys(())) as (version, client):
        link = ScriptedLink(version.dispatcher)
        answer = await ask(client, link, MESSAGES, service_tier="standard_only")
        assert answer.json()["type"] == "message"
        assert "service_tier" not in answer.text


@pytest.mark.parametrize("path", NAMING)
async def test_resumed_request_is_served_as_the_tier_it_began_with(path: str) -> None:
    async with vllm_gateway(key_for("flex")) as (version, client):
        body = {"model": "demo", **ROUTES[path]}
        headers = {"Authorization": "Bearer k"}
        first = ScriptedLink(version.dispatcher, "e1")
        asked = asyncio.create_task(client.post(path, json=body, headers=headers))
        await begun_at(first, asked)
        first.step()
        second = ScriptedLink(version.dispatcher, "e2")
        first.end()
        (resumed,) = second.submitted
        assert resumed.emitted_token_ids
        second.step(2)
        assert (await asked).json()["service_tier"] == "flex"


async def begun_at(link: ScriptedLink, asked: "asyncio.Task[httpx.Response]") -> None:
    while not link.running:
        assert not asked.done(), asked.result().text
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", ROUTES)
async def test_tier_that_a_key_is_not_for_reaches_no_engine(path: str) -> None:
    async with vllm_gateway(key_for("flex")) as (version, client):
        link = ScriptedLink(version.dispatcher)
        for asked in ("priority", "scale", "default"):
            answer = await ask(client, link, path, service_tier=asked)
            assert answer.status_code == 403
            assert "is not for the service_tier" in answer.text
        assert not link.submitted
