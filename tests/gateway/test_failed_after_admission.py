"""A request that fails once vLLM's frontend has it is answered with our error, on every route.

vLLM's frontend is the real one, behind the real edge; the engine is scripted.
"""

import asyncio

import pytest
from starlette.types import ASGIApp

from serving.config.application import GatewayConfig
from serving.gateway.admission import RequestTarget
from serving.gateway.model_version import ModelVersion
from serving.link.messages import Finish, Step, TokenOutput

from .engines import ScriptedLink
from .test_forged_resume import CONFIG, DEADLINE_S, MODEL, ROUTES
from .test_http_edge import EchoFrontend, client_of, edge_over

pytestmark = pytest.mark.imports_vllm


class OneVersion(EchoFrontend):
    """A model whose application is vLLM's."""

    def __init__(self, version: ModelVersion) -> None:
        super().__init__(MODEL)
        self._version = version

    async def enter(self, target: RequestTarget) -> ASGIApp:
        return await self._version.app()


@pytest.mark.parametrize("path", ROUTES)
async def test_failure_has_its_code_and_when_to_come_back(path: str) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    async with asyncio.timeout(DEADLINE_S), client_of(edge) as client:
        asked = asyncio.create_task(client.post(path, json={"model": MODEL, **ROUTES[path]}))
        while not link.submitted:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.01)
        (wire_id,) = link.running
        refusal = TokenOutput(wire_id, [], int(Finish.ERROR), stop_reason="no room")
        version.dispatcher.take_step(link.engine_id, Step([refusal]))
        answer = await asked
        metrics = edge.metrics
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["message"] == "The engine refused the request: no room"
    if path == "/v1/messages":
        assert error["type"] == "overloaded_error"
    else:
        assert (error["type"], error["code"]) == ("server_error", "engine_refused")
    # It was admitted, it was answered once, and nobody cancelled it.
    assert [result for _, result, _ in metrics.admissions] == ["admitted"]
    assert list(metrics.responses.values()) == [1]
    assert not metrics.cancellations
    version.llm.shutdown()
