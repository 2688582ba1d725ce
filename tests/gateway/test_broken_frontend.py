"""A dead frontend answers nothing any more: its gateway says so, to Serve and to probes."""

import asyncio
from typing import Any

import httpx
import pytest

from serving.config.application import GatewayConfig
from serving.gateway.model_version import ModelVersion

from .engines import ScriptedLink
from .test_forged_resume import CONFIG, MODEL
from .test_http_edge import EchoFrontend, client_of, edge_over

DEADLINE_S = 60.0


async def test_health_names_the_model_whose_frontend_has_died() -> None:
    good, bad = EchoFrontend("good"), EchoFrontend("bad")
    edge = edge_over(good, bad)
    async with client_of(edge) as client:
        assert (await client.get("/health")).status_code == 200
        assert edge.broken_models == []
        bad.is_broken = True
        answer = await client.get("/health")
    assert (answer.status_code, edge.broken_models) == (503, ["bad"])
    assert "the frontend of bad has died" in answer.text


@pytest.mark.imports_vllm
async def test_frontend_that_fails_answers_each_request_and_is_known_as_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(served.dispatcher)

    def fail(*_args: Any, **_options: Any) -> None:
        raise AssertionError("an output that vLLM does not expect")

    transport = httpx.ASGITransport(app=await served.app())
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        while not link.submitted:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.01)
        assert not served.is_broken
        monkeypatch.setattr(served.llm.output_processor, "process_outputs", fail)
        link.step(1)
        # vLLM's handler of such errors needs a server of vLLM's, which is not here.
        for answer in (await asked, await client.post("/v1/completions", json=body)):
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == 500
        assert served.is_broken
    served.llm.shutdown()
