"""The times of a request reach from the edge through vLLM's frontend to the numbers."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from serving.config.application import GatewayConfig
from serving.config.models import DeploymentConfig, ModelConfig
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.served_model import ServedModel

from .engines import ScriptedLink
from .test_http_edge import READY, ask_dashboard, client_of

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 30.0


@pytest.fixture
async def model() -> AsyncIterator[ServedModel]:
    config = ModelConfig(
        name="demo",
        source="models/slicewise-demo",
        engine_args={"max_model_len": 512, "dtype": "float32"},
        deployments=(DeploymentConfig(compute_class="local"),),
    )
    model = await ServedModel.build(config, GatewayConfig())
    yield model
    model.close()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_times_of_a_request_reach_through_vllms_frontend(
    model: ServedModel, *, is_streamed: bool
) -> None:
    edge = HttpEdge(
        {"demo": model},
        EdgeRules(ApiKeys(()), 10_000),
        lambda _accept: asyncio.sleep(0, (b"", "")),
        lambda: {},
        ask_dashboard,
        lambda: READY,
    )
    body = {"model": "demo", "prompt": [5, 6], "max_tokens": 4, "stream": is_streamed}
    async with asyncio.timeout(DEADLINE_S), client_of(edge) as client:
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        while not model.num_queued:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        link = ScriptedLink(model.current.dispatcher)
        while not answer.done():
            link.step()
            await asyncio.sleep(0)
    assert answer.result().status_code == 200, json.dumps(answer.result().text)
    numbers = model.request_metrics.classes["local"]
    assert sum(numbers.duration.counts) == 1
    assert sum(numbers.to_first_token.counts) == 1
    assert numbers.output_tokens == 4
    # Without the edge's own time a sequence would have been received when it was taken.
    assert numbers.gateway_input.total > 0
    assert numbers.to_first_token.total > numbers.engine_time.total - numbers.inter_token.total
    assert sum(numbers.gateway_output.counts) >= 1
    assert numbers.queue_times[ServiceClass.STANDARD].total > 0
    assert edge.metrics.responses == {("demo", "/v1/completions", "200"): 1}
