"""Where tenants are separate, no request of one finds blocks of another's in a prefix cache.

The edge in front of vLLM's own frontend, over a scripted link: what matters is the salt that
reaches an engine.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from serving.config.api_keys import read_keys
from serving.config.application import GatewayConfig
from serving.domain.models.engine_kind import EngineKind
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams.engine_client import salt_of
from serving.link.vllm_codec import decode_request, request_decoder

from .engines import ScriptedLink
from .test_forged_resume import CONFIG, ROUTES
from .test_http_edge import EchoFrontend, client_of, edge_over

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 60.0
KEYS = ApiKeys(read_keys("acme k1, acme k2, other k3, k4"))


class ServedBy(EchoFrontend):
    """A frontend whose application is vLLM's."""

    def __init__(self, version: ModelVersion) -> None:
        super().__init__("demo")
        self._version = version

    async def enter(self, target: RequestTarget) -> ASGIApp:
        await super().enter(target)
        return await self._version.app()


@asynccontextmanager
async def vllm_gateway(
    keys: ApiKeys, **rules: Any
) -> AsyncIterator[tuple[ModelVersion, httpx.AsyncClient]]:
    """A gateway with vLLM's own frontend and no engine, and a client of it."""
    # The engines are scripted; paced ones would have no log-probabilities.
    model = CONFIG.model_copy(update={"engine": EngineKind.VLLM, "paced": None})
    version = await ModelVersion.build(model, GatewayConfig())
    edge = edge_over(ServedBy(version), keys=keys, **rules)
    async with asyncio.timeout(DEADLINE_S), client_of(edge) as client:
        yield version, client
    version.llm.shutdown()


class Asked:
    """One gateway, and the salts with which engines were asked by it."""

    def __init__(self, version: ModelVersion) -> None:
        self.version = version
        self.link = ScriptedLink(version.dispatcher)
        self.edge = edge_over(ServedBy(version), keys=KEYS)

    async def salts(self, key: str, path: str, **fields: Any) -> list[str | None]:
        before = len(self.link.submitted)
        body = {"model": "demo", **ROUTES[path], **fields}
        headers = {"Authorization": f"Bearer {key}"}
        async with asyncio.timeout(DEADLINE_S), client_of(self.edge) as client:
            asked = asyncio.create_task(client.post(path, json=body, headers=headers))
            while len(self.link.submitted) < before + fields.get("n", 1):
                assert not asked.done(), asked.result().text
                await asyncio.sleep(0.01)
            self.link.step(3)
            assert (await asked).status_code == 200
        sent = self.link.submitted[before:]
        return [decode_request(request, request_decoder()).cache_salt for request in sent]


async def gateway(*, separate: bool) -> Asked:
    config = GatewayConfig(separate_tenants=separate)
    # The engines are scripted; paced ones would have no log-probabilities.
    model = CONFIG.model_copy(update={"engine": EngineKind.VLLM, "paced": None})
    return Asked(await ModelVersion.build(model, config))


@pytest.mark.parametrize("path", ROUTES)
async def test_tenants_never_share_a_salt_and_one_tenants_keys_always_do(path: str) -> None:
    asked = await gateway(separate=True)
    salts = {key: await asked.salts(key, path) for key in ("k1", "k2", "k3", "k4")}
    assert salts["k1"] == salts["k2"] == [salt_of("acme", None)]
    assert len({salt for (salt,) in salts.values()}) == 3
    # What a client knows of another tenant's salt does not get it in there.
    (forged,) = await asked.salts("k3", path, cache_salt=salt_of("acme", None))
    assert forged not in (salt_of("acme", None), *salts["k3"])
    # A salt of its own divides a tenant's prompts further.
    (one,), (two,) = [await asked.salts("k1", path, cache_salt=own) for own in ("x", "y")]
    assert len({one, two, *salts["k1"]}) == 3
    assert [one] == await asked.salts("k2", path, cache_salt="x")
    asked.version.llm.shutdown()


async def test_every_answer_of_one_request_has_its_tenants_salt_and_keeps_it_when_resumed() -> None:
    asked = await gateway(separate=True)
    salt = salt_of("acme", "x")
    assert await asked.salts("k1", "/v1/completions", n=3, cache_salt="x") == [salt] * 3
    first = asked.link
    body = {"model": "demo", "prompt": "A slice is", "max_tokens": 3, "prompt_logprobs": 0}
    headers = {"Authorization": "Bearer k1"}
    async with asyncio.timeout(DEADLINE_S), client_of(asked.edge) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        while not first.running:
            assert not request.done(), request.result().text
            await asyncio.sleep(0.01)
        first.step()
        second = ScriptedLink(asked.version.dispatcher, "e2")
        first.end()
        (resumed,) = second.submitted
        assert resumed.emitted_token_ids
        assert decode_request(resumed, request_decoder()).cache_salt == salt_of("acme", None)
        second.step(3)
        await request
    asked.version.llm.shutdown()


async def test_without_separation_a_clients_own_salt_is_passed_on_and_no_other_made() -> None:
    asked = await gateway(separate=False)
    assert await asked.salts("k1", "/v1/completions") == [None]
    assert await asked.salts("k3", "/v1/completions", cache_salt="x") == ["x"]
    asked.version.llm.shutdown()


def test_salt_is_of_one_tenant_and_one_own_salt_alone() -> None:
    pairs: list[tuple[str, str | None]] = [
        ("a", None), ("a", ""), ("a", "b"), ("ab", None), ("ab", ""), ("", "ab"), ('a","b', None)
    ]  # fmt: skip
    assert len({salt_of(*pair) for pair in pairs}) == len(pairs)


async def test_key_that_vllm_finds_in_the_environment_is_asked_of_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "vllms-own")
    asked = await gateway(separate=False)
    assert await asked.salts("k1", "/v1/completions") == [None]
    asked.version.llm.shutdown()
