"""What clients see of their tenants' quotas: headers, refusals with a time, and what counts."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serving.config.api_keys import read_keys
from serving.domain.slice_records import Snapshot
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.quotas.book import QuotaBook
from serving.gateway.reports.fleet_view import GatewayView, describe_fleet

from .engines import ScriptedLink
from .test_http_edge import EchoFrontend, client_of, edge_over
from .test_separate_tenants import vllm_gateway

OPERATOR_KEY = "k4"
BODY = {"model": "demo", "prompt": "A slice is", "max_tokens": 4}


def keys(*quotas: dict[str, Any]) -> ApiKeys:
    """Two keys of one tenant with these quotas, one of another without any, and an operator's."""
    entry = {"tenant": "acme", "quotas": list(quotas)}
    entries = [
        {"name": "a", "key": "k1", **entry},
        {"name": "b", "key": "k2", **entry},
        {"name": "c", "key": "k3", "tenant": "other"},
        {"name": "d", "key": OPERATOR_KEY, "scopes": ["fleet"]},
    ]
    return ApiKeys(read_keys(json.dumps({"keys": entries})))


async def ask(
    client: httpx.AsyncClient, key: str = "k1", path: str = "/v1/completions", **fields: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return await client.post(path, json=BODY | fields, headers=headers)


async def test_a_tenants_keys_share_its_quota_and_others_have_none() -> None:
    edge = edge_over(EchoFrontend("demo"), keys=keys({"requests": 2, "per": "minute"}))
    async with client_of(edge) as client:
        first, second = await ask(client), await ask(client, "k2")
        assert [first.status_code, second.status_code] == [200, 200]
        left = "x-ratelimit-remaining-requests"
        assert [first.headers[left], second.headers[left]] == ["1", "0"]
        refused = await ask(client)
        other = await ask(client, "k3")
    assert (refused.status_code, refused.headers[left]) == (429, "0")
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 of 2 requests per minute are used" in error["message"]
    assert other.status_code == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_a_refusal_is_in_anthropics_form_on_its_route() -> None:
    edge = edge_over(EchoFrontend("demo"), keys=keys({"requests": 1, "per": "day"}))
    async with client_of(edge) as client:
        await ask(client)
        refused = await ask(client, path="/v1/messages")
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) > 80_000


async def test_a_quota_of_some_models_is_for_these_and_their_adapters() -> None:
    quota = {"requests": 1, "per": "minute", "models": ["demo"]}
    frontends = EchoFrontend("demo", ("sql",)), EchoFrontend("free")
    async with client_of(edge_over(*frontends, keys=keys(quota))) as client:
        assert (await ask(client, model="sql")).status_code == 200
        assert (await ask(client)).status_code == 429
        free = await ask(client, model="free")
    assert free.status_code == 200
    assert "x-ratelimit-limit-requests" not in free.headers


async def test_requests_in_flight_count_until_their_end() -> None:
    frontend = EchoFrontend("demo")
    edge = edge_over(frontend, keys=keys({"concurrent": 1}))
    async with client_of(edge) as client:
        lingering = asyncio.create_task(ask(client, prompt="linger"))
        while (await ask(client)).status_code != 429:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        lingering.cancel()
        await asyncio.gather(lingering, return_exceptions=True)
        while (answer := await ask(client)).status_code == 429:
            assert answer.headers["retry-after"] == "1"
            await asyncio.sleep(0)
        assert answer.status_code == 200


async def test_operators_see_what_tenants_use_and_were_refused_and_no_key() -> None:
    book = QuotaBook()
    quotas = {"requests": 2, "per": "minute"}, {"concurrent": 4}

    def describe() -> dict[str, Any]:
        now_s = time.time()
        return describe_fleet(
            GatewayView("gw", now_s), (), Snapshot("v"), now_s, uses=book.uses(now_s)
        )

    edge = edge_over(EchoFrontend("demo"), keys=keys(*quotas), quotas=book, describe_fleet=describe)
    book.know(edge.tenant_quotas)
    async with client_of(edge) as client:
        statuses = [(await ask(client)).status_code for _ in range(4)]
        answer = await client.get("/fleet", headers={"Authorization": f"Bearer {OPERATOR_KEY}"})
    assert statuses == [200, 200, 429, 429]
    assert answer.json()["quotas"] == [
        {
            "tenant": "acme",
            "quota": "2 requests per minute",
            "limit": 2,
            "used": 2,
            "refused": 2,
        },
        {"tenant": "acme", "quota": "4 concurrent", "limit": 4, "used": 0, "refused": 0},
    ]
    assert not [key for key in ("k1", "k2", "k3", OPERATOR_KEY) if key in answer.text]


@asynccontextmanager
async def gateway(*quotas: dict[str, Any]) -> AsyncIterator[tuple[ScriptedLink, httpx.AsyncClient]]:
    async with vllm_gateway(keys(*quotas)) as (version, client):
        yield ScriptedLink(version.dispatcher), client


async def answered(link: ScriptedLink, client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Asks, and lets the engine make steps until there is an answer."""
    asked = asyncio.create_task(ask(client, **fields))
    while not asked.done():
        link.step()
        await asyncio.sleep(0.005)
    return await asked


def left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.imports_vllm
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_count_and_too_many_are_refused(
    *, stream: bool
) -> None:
    async with gateway({"tokens": 30, "per": "hour"}) as (link, client):
        usage = (await answered(link, client)).json()["usage"]
        after = await answered(link, client, stream=stream)
        assert left(after) == 30 - usage["total_tokens"]
        num = 2
        while (answer := await answered(link, client, stream=stream)).status_code == 200:
            num += 1
            assert num < 30
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) > 0
        # What is refused takes nothing.
        assert left(await answered(link, client)) == 30 - num * usage["total_tokens"]


@pytest.mark.imports_vllm
async def test_a_prompt_that_no_quota_holds_is_told_so_and_every_sequence_counts() -> None:
    async with gateway({"tokens": 30, "per": "hour"}) as (link, client):
        refused = await answered(link, client, prompt=[7] * 31)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_over_quota")
        usage = (await answered(link, client, max_tokens=2)).json()["usage"]
        await answered(link, client, n=2, max_tokens=2)
        each = usage["total_tokens"]
        assert left(await answered(link, client, max_tokens=1)) == 30 - 3 * each
