"""What a gateway tells of one of its last requests: why it waited, went where it went, moved."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from serving.config.api_keys import read_keys
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.model_version import ModelVersion
from serving.gateway.telemetry.request_story import (
    MAX_EVENTS,
    Because,
    EngineChoice,
    RequestStories,
    RequestStory,
)

from .engines import ScriptedLink
from .test_separate_tenants import vllm_gateway

KEYS = '{"keys": [{"name": "a", "key": "k1", "tenant": "acme", "scopes": ["inference"]},'
KEYS += ' {"name": "b", "key": "k2", "scopes": ["fleet"]}]}'
BODY = {"model": "demo", "prompt": "A slice is", "max_tokens": 4}
OPERATOR = {"Authorization": "Bearer k2"}


def gateway() -> AbstractAsyncContextManager[tuple[ModelVersion, httpx.AsyncClient]]:
    return vllm_gateway(ApiKeys(read_keys(KEYS)), gateway_id="g1")


def ask(client: httpx.AsyncClient, request_id: str, **fields: Any) -> Awaitable[httpx.Response]:
    headers = {"Authorization": "Bearer k1", "x-request-id": request_id}
    asked = client.post("/v1/completions", json=BODY | fields, headers=headers)
    return asyncio.create_task(asked)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


async def story_of(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    answer = await client.get(f"/fleet/requests/{request_id}", headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.imports_vllm
async def test_waits_engines_and_moves_are_told_in_their_order_with_reasons() -> None:
    async with gateway() as (version, client):
        first = ScriptedLink(version.dispatcher, "e1", places=0)
        asked = ask(client, "mine")
        await until(lambda: version.dispatcher.num_waiting == 1)
        first.places = 1
        first.tell()
        first.step()
        second = ScriptedLink(version.dispatcher, "e2", places=1)
        version.dispatcher.lose_engine("e1", "its host is gone")
        second.step(3)
        assert (await asked).status_code == 200
        told = await story_of(client, "mine")
    events = told.pop("events")
    assert [event["event"] for event in events] == [
        *("admitted", "waits", "dispatched", "first_token"),
        *("left", "dispatched", "goes_on", "ended", "answered"),
    ]
    _, waits, to_first, _, left, to_second, _, ended, answered = events
    assert waits["reason"] == "no engine has room for it"
    assert (to_first["engine_id"], to_second["engine_id"]) == ("e1", "e2")
    assert (to_first["engines"], to_first["in_flight"]) == (1, 0)
    assert to_first["because"] == to_second["because"] == "only_one"
    assert (left["cause"], left["reason"]) == ("lost", "its host is gone")
    # One has been emitted, and has to be computed again with the prompt.
    assert to_second["tokens"] == to_first["tokens"] + left["emitted_tokens"]
    assert (ended["outcome"], ended["output_tokens"]) == ("length", 4)
    assert answered["status"] == 200
    times = [event["in_s"] for event in events]
    assert times == sorted(times)
    assert told.pop("received_at_s") > 1_700_000_000
    assert told == {
        "gateway": "g1",
        "request_id": "mine",
        "path": "/v1/completions",
        "model": "demo",
        "tenant": "acme",
        "service_class": "standard",
        "events_left_out": 0,
    }
    assert "A slice is" not in str(events)


@pytest.mark.imports_vllm
async def test_sequences_are_told_apart_and_a_refusal_has_its_reason() -> None:
    async with gateway() as (version, client):
        link = ScriptedLink(version.dispatcher)
        asked = ask(client, "two", n=2)
        await until(lambda: len(link.running) == 2)
        link.step(4)
        await asked
        numbers = {event.get("sequence") for event in (await story_of(client, "two"))["events"]}
        assert numbers == {None, 0, 1}
        refused = await ask(client, "bad", temperature=-1)
        told = await story_of(client, "bad")
    assert refused.status_code == 400
    assert [event["event"] for event in told["events"]] == ["admitted", "answered"]
    assert told["events"][-1]["status"] == 400


@pytest.mark.imports_vllm
async def test_only_operators_read_stories_and_a_gateway_says_that_it_knows_none() -> None:
    async with gateway() as (_, client):
        holder = {"Authorization": "Bearer k1"}
        assert (await client.get("/fleet/requests/mine", headers=holder)).status_code == 403
        assert (await client.get("/fleet/requests/mine")).status_code == 401
        answer = await client.get("/fleet/requests/mine", headers=OPERATOR)
        assert answer.status_code == 404
        assert answer.json()["gateway"] == "g1"
        assert answer.json()["error"]["code"] == "unknown_request"


def story(request_id: str, at_s: float = 0.0) -> RequestStory:
    return RequestStory(request_id, "/v1/completions", "demo", "acme", "standard", at_s)


def test_the_last_ones_are_kept_and_of_one_id_the_last() -> None:
    stories = RequestStories(max_stories=2)
    for number, request_id in enumerate(["a", "b", "a", "c"]):
        stories.begin(story(request_id, number))
    known = {name: stories.describe(name) for name in "abc"}
    assert known["b"] is None
    offset_s = known["c"]["received_at_s"] - 3  # type: ignore[index]
    assert known["a"]["received_at_s"] == pytest.approx(2 + offset_s, abs=0.01)  # type: ignore[index]


def test_events_have_a_bound_and_what_is_left_out_is_counted() -> None:
    told = story("a")
    for _ in range(MAX_EVENTS + 3):
        told.tell("waits", 1.0, reason="no engine is ready")
    described = told.described(0.0)
    assert (len(described["events"]), described["events_left_out"]) == (MAX_EVENTS, 3)


def test_what_was_known_of_a_cache_is_told_and_what_was_not_is_none() -> None:
    unknown = EngineChoice(Because.CACHED, 2)
    assert unknown.facts()["expected_cached_tokens"] is None
    assert unknown.reason == "for what it most likely has cached"
    known = EngineChoice(Because.CACHED, 2, expected_cached=0)
    assert known.facts()["expected_cached_tokens"] == 0
    assert known.reason == "for what it has cached (0 tokens)"


@pytest.mark.parametrize("because", Because)
def test_every_reason_has_words_of_its_own(because: Because) -> None:
    reasons = [EngineChoice(each, 2).reason for each in Because]
    assert len(set(reasons)) == len(Because)
    facts = EngineChoice(because, 2).facts()
    assert (facts["because"], facts["reason"] in reasons) == (because.value, True)
