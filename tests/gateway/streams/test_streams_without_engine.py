"""A stream that waits for a model without an engine is begun in time, and kept open.

Over HTTP, with the model's own admission and vLLM's application; engines are scripted.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from serving.config.api_keys import read_keys
from serving.config.application import GatewayConfig
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.served_model import ServedModel
from serving.gateway.streams import answer_head
from tests.gateway.engines import ScriptedLink
from tests.gateway.test_forged_resume import CONFIG, MODEL, ROUTES
from tests.gateway.test_http_edge import EchoFrontend, edge_over
from tests.gateway.test_served_model import engine_of

from .over_http import HttpStream, http_server, without_names

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 60.0
SHORT_S = 0.01
COMMENT = b": waiting\n\n"
PATIENT = GatewayConfig(max_behind_s=600.0)
# Long enough for a head and a few comments.
HASTY = GatewayConfig(max_behind_s=600.0, request_deadline_s=100 * SHORT_S)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_head, "HEAD_AFTER_S", SHORT_S)
    monkeypatch.setattr(answer_head, "COMMENT_EVERY_S", SHORT_S)


@asynccontextmanager
async def gateway(config: GatewayConfig, **edge: Any) -> AsyncIterator[tuple[ServedModel, int]]:
    """The model without an engine, and the port at which it is asked."""
    model = await ServedModel.build(CONFIG, config)
    at_edge = edge_over(cast("EchoFrontend", model), **edge)
    async with asyncio.timeout(DEADLINE_S), http_server(at_edge) as port:
        yield model, port
    model.close()


async def begun(stream: HttpStream, num_comments: int = 2) -> None:
    """Waits until a stream has comments, and nothing else."""
    while len(stream.parts) < num_comments:
        stream.came.clear()
        await stream.came.wait()
    assert set(stream.parts) == {COMMENT}


async def answered(link: ScriptedLink, stream: HttpStream) -> None:
    """Has the engine answer the one request that it gets."""
    while not link.running:
        assert not stream.task.done(), stream.parts
        await asyncio.sleep(SHORT_S)
    while link.running:
        link.step()
        await asyncio.sleep(SHORT_S)
    await stream.task


def shape(stream: HttpStream) -> list[dict[str, Any]]:
    """Its events without ids and times, which differ between any two answers."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items() if name not in _OWN}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return [plain(event) for event in without_names(stream.events)]


_OWN = ("id", "item_id", "created_at", "completed_at", "created")


@pytest.mark.parametrize("path", ROUTES)
async def test_stream_that_has_waited_for_an_engine_is_the_one_that_has_not(path: str) -> None:
    body = {"model": MODEL, "stream": True, **ROUTES[path]}
    async with gateway(PATIENT) as (model, port):
        waiting = HttpStream(port, path, body)
        await begun(waiting)
        link = await engine_of(model, CONFIG, "e1")
        await answered(link, waiting)
        direct = HttpStream(port, path, body)
        await answered(link, direct)
    assert (waiting.status, direct.status) == (200, 200)
    head = ("content-type", "transfer-encoding")
    assert [waiting.headers[name] for name in head] == [direct.headers[name] for name in head]
    assert len(shape(direct)) > 1
    assert shape(waiting) == shape(direct)


@pytest.mark.parametrize("path", ROUTES)
async def test_stream_for_which_no_engine_comes_ends_with_the_error_in_its_clients_form(
    path: str,
) -> None:
    async with gateway(HASTY) as (model, port):
        stream = HttpStream(port, path, {"model": MODEL, "stream": True, **ROUTES[path]})
        await begun(stream)
        await stream.task
        assert not model.describe()["waiting"]
    assert stream.status == 200
    assert set(stream.parts[:-1]) == {COMMENT}
    (error,) = stream.events
    words = "became ready within"
    if path == "/v1/messages":
        assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
        assert words in error["error"]["message"]
    elif path == "/v1/responses":
        assert (error["type"], error["code"]) == ("error", "no_engine_in_time")
        assert error["sequence_number"] == 0
        assert words in error["message"]
    else:
        assert error["error"]["type"] == "server_error"
        assert error["error"]["code"] == "no_engine_in_time"
        assert words in error["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
async def test_what_vllm_refuses_behind_the_head_is_told_in_the_stream(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait it is an answer of its own, with a status."""
    body = {"model": MODEL, "stream": True, "temperature": -1, **ROUTES[path]}
    async with gateway(PATIENT) as (model, port):
        stream = HttpStream(port, path, body)
        await begun(stream)
        await engine_of(model, CONFIG, "e1")
        await stream.task
        monkeypatch.setattr(answer_head, "HEAD_AFTER_S", DEADLINE_S)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            refused = await client.post(path, json=body)
    assert (stream.status, refused.status_code) == (200, 400)
    (told,) = stream.events
    answer = refused.json()
    if path != "/v1/messages":
        answer["error"]["code"] = str(answer["error"]["code"])
    if path == "/v1/responses":
        answer = {**answer["error"], "type": "error", "sequence_number": 0}
    assert told == answer


async def test_request_that_is_no_stream_has_the_errors_status_and_when_to_come_back() -> None:
    async with (
        gateway(HASTY) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        for asked in ({}, {"stream": False}, {"stream": None}):
            answer = await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "x"} | asked
            )
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "no_engine_in_time"


async def test_client_that_leaves_a_stream_that_waits_is_noticed() -> None:
    async with gateway(PATIENT) as (model, port):
        stream = HttpStream(
            port, "/v1/completions", {"model": MODEL, "stream": True, "prompt": "x"}
        )
        await begun(stream)
        assert model.describe()["waiting"] == 1
        stream.task.cancel()
        while model.describe()["waiting"]:  # noqa: ASYNC110 - the gateway tells nobody
            await asyncio.sleep(SHORT_S)


async def test_head_of_a_stream_that_waits_says_what_is_left_of_quotas() -> None:
    """A refusal in the stream is not charged."""
    quota = {"requests": 5, "per": "minute"}
    entry = {"name": "a", "key": "k1", "tenant": "acme", "quotas": [quota]}
    keys = ApiKeys(read_keys(json.dumps({"keys": [entry]})))
    async with gateway(HASTY, keys=keys) as (_, port):
        for _ in range(2):
            body = {"model": MODEL, "stream": True, "prompt": "x"}
            stream = HttpStream(port, "/v1/completions", body, key="k1")
            await stream.task
            assert stream.status == 200
            assert stream.headers["x-ratelimit-limit-requests"] == "5"
            # Of the second, too.
            assert stream.headers["x-ratelimit-remaining-requests"] == "4"
