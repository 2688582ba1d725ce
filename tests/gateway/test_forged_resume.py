"""What a client writes into a request never reaches an engine as a resume, on any route.

The real frontend of vLLM over a scripted link, without the edge in front, which refuses such
requests first (`test_refused_fields`).
"""

import asyncio
from typing import Any

import httpx
import pytest

from serving.config.application import GatewayConfig, OpenField
from serving.config.models import ModelConfig
from serving.gateway.model_version import ModelVersion
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext
from serving.link.vllm_codec import EMITTED_KEY, decode_request, emitted_token_ids, request_decoder

from .engines import ScriptedLink

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 60.0
MODEL = "demo"
CONFIG = ModelConfig.model_validate(
    {
        "name": MODEL,
        "source": "models/slicewise-demo",
        "engine": "paced",
        "deployments": ({"compute_class": "local"},),
    }
)
OPEN = GatewayConfig(open_fields=(OpenField.VLLM_XARGS,))
MESSAGES = [{"role": "user", "content": "What is a slice?"}]
# What vLLM does not read on a route: path, field, and the header if it is one.
UNREAD = {
    ("/v1/messages", "priority"),
    ("/v1/responses", "data_parallel_rank", "X-data-parallel-rank"),
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "A slice is", "max_tokens": 3},
    "/v1/responses": {"input": "What is a slice?", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("forged", [1.5, 5, "tokens", [5], [2_000_000_000], [1.5]])
async def test_forged_resume_stays_at_the_gateway(path: str, forged: object) -> None:
    served = await ModelVersion.build(CONFIG, OPEN)
    link = ScriptedLink(served.dispatcher)
    body = {"model": MODEL, "vllm_xargs": {EMITTED_KEY: forged, "mine": 1}, **ROUTES[path]}
    transport = httpx.ASGITransport(app=await served.app())
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        asked = asyncio.create_task(client.post(path, json=body))
        while not link.submitted:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.01)
        (request,) = link.submitted
        assert request.emitted_token_ids == []
        assert EMITTED_KEY.encode() not in b"".join(request.payload)
        # What the route passes on otherwise it still does: the test looked at the right place.
        arrived = decode_request(request, request_decoder()).sampling_params
        assert arrived is not None
        assert arrived.extra_args == {"mine": 1}
        assert emitted_token_ids(arrived) is None
        link.step(3)
        assert (await asked).status_code == 200
    served.llm.shutdown()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "headers", "named"),
    [
        ({"vllm_xargs": {"mine": 1}}, {}, "vllm_xargs"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, {}, "kv_transfer_params"),
        ({"ec_transfer_params": {"a": 1}}, {}, "ec_transfer_params"),
        ({"priority": -1}, {}, "priority"),
        ({}, {"X-Vllm-Priority": "-1"}, "priority"),
        ({}, {"X-data-parallel-rank": "0"}, "data_parallel_rank"),
    ],
)
async def test_what_steers_an_engine_is_refused_behind_vllms_own_reading_too(
    path: str, fields: dict[str, Any], headers: dict[str, str], named: str
) -> None:
    served = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(served.dispatcher)
    transport = httpx.ASGITransport(app=await served.app())
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        body = {"model": MODEL, **ROUTES[path], **fields}
        asked = asyncio.create_task(client.post(path, json=body, headers=headers))
        while not (asked.done() or link.submitted):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        if (path, named, *headers) in UNREAD:  # vLLM does not read it there: nothing is steered
            (request,) = link.submitted
            arrived = decode_request(request, request_decoder())
            assert (arrived.priority, arrived.data_parallel_rank) == (0, None)
            assert arrived.sampling_params is not None
            assert arrived.sampling_params.extra_args is None
            link.step(3)
            assert (await asked).status_code == 200
        else:
            answer = await asked
            assert answer.status_code == 400, answer.text
            assert f"{named} steers engines" in answer.text
            assert not link.submitted
    served.llm.shutdown()


@pytest.mark.parametrize("path", sorted(ROUTES.keys() - {"/v1/messages"}))
async def test_field_that_a_key_opens_reaches_the_engine_in_its_requests_alone(path: str) -> None:
    served = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(served.dispatcher)
    transport = httpx.ASGITransport(app=await served.app())
    body = {"model": MODEL, "priority": -1, **ROUTES[path]}
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        opened = RequestContext(0.0, open_fields=frozenset({OpenField.PRIORITY}))
        token = REQUEST_CONTEXT.set(opened)
        asked = asyncio.create_task(client.post(path, json=body))
        REQUEST_CONTEXT.reset(token)
        while not link.submitted:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.01)
        assert decode_request(link.submitted[0], request_decoder()).priority == -1
        link.step(3)
        assert (await asked).status_code == 200
        assert (await client.post(path, json=body)).status_code == 400
    served.llm.shutdown()
