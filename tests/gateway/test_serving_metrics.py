"""The fleet client and vLLM's frontend tell the meters what happens, all the way."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from serving.config.application import DeploymentConfig, GatewayConfig, ModelConfig
from serving.gateway.auth import ApiKeys
from serving.gateway.fleet_core import FleetCore, FleetLimits
from serving.gateway.http import EdgeRules, HttpEdge
from serving.gateway.model_versions import ModelVersions
from serving.gateway.telemetry.request_metrics import ClassMeter

from .engines import ScriptedLink, core_request
from .test_http_edge import ask_dashboard, client_of

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 30.0


@pytest.fixture
def core() -> FleetCore:
    core = FleetCore("demo", FleetLimits(request_deadline_s=600.0, max_engine_losses=1), ())
    core.set_failure_sink(lambda _request_id, _error: None)
    return core


def local(core: FleetCore) -> ClassMeter:
    return core.request_meter.classes["local"]


async def test_undisturbed_sequence_is_counted_with_its_tokens(core: FleetCore) -> None:
    link = ScriptedLink(core)
    await core.add_request_async(core_request("r", 5, [1, 2, 3]))
    link.step(5)
    meter = local(core)
    assert (meter.input_tokens, meter.output_tokens) == (3, 5)
    assert meter.sequences == {"length": 1}
    histograms = (meter.to_first_token, meter.inter_token, meter.queue_time, meter.per_output_token)
    assert [sum(each.counts) for each in histograms] == [1, 4, 1, 1]


async def test_aborted_sequence_is_counted_once(core: FleetCore) -> None:
    ScriptedLink(core)
    await core.add_request_async(core_request("r"))
    await core.abort_requests_async(["r", "r", "nobody"])
    assert local(core).sequences == {"aborted": 1}


async def test_sequence_aborted_while_it_waits_has_no_class(core: FleetCore) -> None:
    await core.add_request_async(core_request("r"))
    await core.abort_requests_async(["r"])
    assert core.request_meter.classes[""].sequences == {"aborted": 1}


async def test_moves_are_counted_by_why_their_engine_went(core: FleetCore) -> None:
    links = [ScriptedLink(core, f"e{i}") for i in range(2)]
    await core.add_request_async(core_request("r", 50))
    here = next(link for link in links if link.running)
    there = next(link for link in links if not link.running)
    here.step()
    core.drain_engine(here.engine_id, "the test says so", 0.0)
    there.step()
    meter = local(core)
    assert meter.resumes == {"draining": 1}
    assert sum(meter.resume_stall.counts) == 1
    here.end()
    assert meter.link_losses == {"draining": 1}


async def test_lost_engine_counts_its_link_and_what_it_took_down(core: FleetCore) -> None:
    link = ScriptedLink(core)
    await core.add_request_async(core_request("r"))
    link.end()
    core.abort_requests(["r"])  # vLLM's frontend cleans up after a failure
    meter = local(core)
    assert meter.link_losses == {"lost": 1}
    assert meter.sequences == {"poison_request": 1}
    assert meter.resumes == {}


@pytest.fixture
async def model() -> AsyncIterator[ModelVersions]:
    config = ModelConfig(
        name="demo",
        source="models/slicewise-demo",
        engine_args={"max_model_len": 512, "dtype": "float32"},
        deployments=(DeploymentConfig(compute_class="local"),),
    )
    model = await ModelVersions.build(config, GatewayConfig())
    yield model
    model.close()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_times_of_a_request_reach_through_vllms_frontend(
    model: ModelVersions, *, is_streamed: bool
) -> None:
    edge = HttpEdge(
        {"demo": model},
        EdgeRules(ApiKeys(()), 10_000),
        lambda _accept: asyncio.sleep(0, (b"", "")),
        lambda: {},
        ask_dashboard,
    )
    body = {"model": "demo", "prompt": [5, 6], "max_tokens": 4, "stream": is_streamed}
    async with asyncio.timeout(DEADLINE_S), client_of(edge) as client:
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        while not model.num_at_the_door:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        link = ScriptedLink(model.current.core)
        while not answer.done():
            link.step()
            await asyncio.sleep(0)
    assert answer.result().status_code == 200, json.dumps(answer.result().text)
    meter = local(model.current.core)
    assert sum(meter.duration.counts) == 1
    assert sum(meter.to_first_token.counts) == 1
    assert meter.output_tokens == 4
    # Without the edge's own time a sequence would have been received when it was taken.
    assert meter.gateway_input.total > 0
    assert meter.to_first_token.total > meter.engine_time.total - meter.inter_token.total
    assert sum(meter.gateway_output.counts) >= 1
    assert meter.queue_time.total > 0
    assert edge.meter.responses == {("demo", "/v1/completions", "200"): 1}
