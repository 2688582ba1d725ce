"""Traces through the HTTP edge, vLLM's frontend, real links and paced engines to a collector."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serving.config.application import GatewayConfig
from serving.config.models import DeploymentConfig, ModelConfig
from serving.domain.capacity.objectives import ObjectivesConfig
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.membership import LinkSettings, Membership
from serving.gateway.metrics.page import render_metrics
from serving.gateway.metrics.requests import ServingCollector
from serving.gateway.served_model import ServedModel
from serving.link.heartbeat import HeartbeatConfig
from serving.link.server import LinkServer
from serving.telemetry.otlp import OtlpTracer
from serving.telemetry.spans import NO_TRACER, Tracer
from tests.telemetry.collector import Collector, collecting, tracer_to

from .test_http_edge import READY, ask_dashboard, client_of, post_scope

pytestmark = pytest.mark.imports_vllm

SECRET = b"the cluster secret of these tests"
DEADLINE_S = 60.0
CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# Slow enough that an engine can be lost in the middle of an answer.
PACE = PacedConfig(
    ttft_s=0.01, time_per_token_s=0.004, max_model_len=512, vocab_size=2**31, max_num_seqs=8
)
BODY = {
    "model": "demo",
    "prompt": [70, 71],
    "max_tokens": 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def num_tokens(answer: httpx.Response) -> int:
    """What a streamed answer says of its tokens at its end."""
    *_, last, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]", answer.text
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


class Stage:
    """One gateway and its engines in one process, each with a tracer of its own."""

    def __init__(self, model: ServedModel, tracer: Tracer, endpoint: str | None) -> None:
        self.model = model
        self.tracer = tracer
        self.engines: dict[str, PacedEngine] = {}
        self.servers: list[LinkServer] = []
        self.engine_tracers: list[OtlpTracer] = []
        self.membership = Membership({"demo": model}, LinkSettings("gw", SECRET, HeartbeatConfig()))
        metrics = CollectorRegistry(auto_describe=False)
        self.edge = HttpEdge(
            {"demo": model},
            EdgeRules(ApiKeys(()), 10_000),
            lambda accept: render_metrics([metrics], "gw", accept),
            lambda: {},
            ask_dashboard,
            lambda: READY,
            tracer=tracer,
        )
        metrics.register(ServingCollector({"demo": model}, self.edge.metrics))
        self._endpoint = endpoint

    async def start_engines(self, num_engines: int) -> None:
        records = []
        for number in range(1, num_engines + 1):
            engine_id = f"e{number}"
            tracer: Tracer = NO_TRACER
            if self._endpoint is not None:
                tracer = tracer_to(self._endpoint, "engine")
                self.engine_tracers.append(tracer)
            engine = self.engines[engine_id] = PacedEngine(PACE)
            server = LinkServer(engine, engine_id=engine_id, secret=SECRET, tracer=tracer)
            await server.listen()
            self.servers.append(server)
            life = SliceLifecycle.begin(0.0).enter(
                SliceState.RESERVED, 1.0, "the test says so", slice_name=f"slice-{number}"
            )
            records.append(
                SliceRecord(
                    engine_id, "demo", "spot", life, engine_id=engine_id, address=server.address
                )
            )
        self.membership.apply(Snapshot("v", tuple(records)))
        await self.until(lambda: len(self.model.current.dispatcher.connections) == num_engines)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)

    @property
    def busy(self) -> list[str]:
        """Engines whose request has a token."""
        return [
            engine.engine_id
            for engine in self.model.current.dispatcher.connections
            if any(request.num_tokens_since_dispatch for request in engine.requests.values())
        ]

    async def send_traces(self) -> None:
        """Waits until every engine is empty; then nothing has been left open or unsent."""
        await self.until(lambda: not any(server.num_requests for server in self.servers))
        for tracer in (self.tracer, *self.engine_tracers):
            if isinstance(tracer, OtlpTracer):
                await asyncio.to_thread(tracer.flush)
                assert tracer.num_open == 0


@asynccontextmanager
async def stage_for(
    tracer: Tracer,
    num_engines: int,
    endpoint: str | None = None,
    objectives: ObjectivesConfig | None = None,
) -> AsyncIterator[Stage]:
    config = ModelConfig(
        name="demo",
        source="models/slicewise-demo",
        engine_args={"max_model_len": 512, "dtype": "float32"},
        deployments=(DeploymentConfig(compute_class="spot"),),
        objectives=objectives,
    )
    model = await ServedModel.build(config, GatewayConfig())
    stage = Stage(model, tracer, endpoint)
    try:
        await stage.start_engines(num_engines)
        yield stage
    finally:
        await stage.membership.close()
        for server in stage.servers:
            await server.close()
        for engine in stage.engines.values():
            await engine.close()
        model.close()
        for each in (stage.tracer, *stage.engine_tracers):
            each.close(0.1)


@asynccontextmanager
async def traced(num_engines: int) -> AsyncIterator[tuple[Stage, Collector]]:
    with collecting() as (collector, endpoint):
        async with stage_for(tracer_to(endpoint), num_engines, endpoint) as stage:
            yield stage, collector


async def test_one_request_is_one_tree_of_spans() -> None:
    async with traced(num_engines=1) as (stage, collector):
        async with client_of(stage.edge) as client:
            headers = {"x-request-id": "client-7", "traceparent": CLIENTS}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert num_tokens(answer) == 40
        await stage.send_traces()
    request, attempt, engine = "POST /v1/completions", "engine attempt", "engine"
    assert collector.tree() == {
        "": [request],
        request: ["admission", attempt],
        attempt: [engine],
    }
    assert {span.trace_id for span in collector.spans} == {CLIENTS[3:35]}
    assert not any(span.is_error for span in collector.spans)
    (root,), (tried,), (ran,) = map(collector.named, (request, attempt, engine))
    assert root.parent_id == CLIENTS[36:52]
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slicewise",
        "gen_ai.request.model": "demo",
        "slicewise.request_id": "client-7",
        "slicewise.resumes": 0,
    }
    assert list(root.events) == ["first_byte", "stream_end"]
    sequence_id = tried.attributes["slicewise.sequence_id"]
    assert sequence_id.startswith("cmpl-client-7-0-")
    assert tried.attributes == {
        "gen_ai.provider.name": "slicewise",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 40,
        "slicewise.sequence_id": sequence_id,
        "slicewise.attempt": 1,
        "slicewise.engines": 1,
        "slicewise.route": "no other engine can have it now",
        "slicewise.engine_id": "e1",
        "slicewise.compute_class": "spot",
        "slicewise.slice": "slice-1",
        "slicewise.outcome": "length",
    }
    assert list(tried.events) == ["first_token"]
    assert ran.service == "engine"
    assert list(ran.events) == ["scheduled", "first_token"]
    assert ran.attributes["slicewise.wire_id"] == sequence_id
    assert ran.attributes["slicewise.outcome"] == "length"
    assert ran.attributes["gen_ai.usage.output_tokens"] == 40
    parts = [
        ran.attributes[f"slicewise.engine.{part}_s"] for part in ("queue", "prefill", "decode")
    ]
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) <= (ran.end_ns - ran.start_ns) / 1e9 + 0.001
    assert root.start_ns <= tried.start_ns <= tried.events["first_token"] <= tried.end_ns
    assert tried.end_ns <= root.end_ns


async def test_resumed_request_has_two_attempts_with_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "serving")
    async with traced(num_engines=2) as (stage, collector):
        async with client_of(stage.edge) as client:
            headers = {"x-request-id": "client-8"}
            posting = client.post("/v1/completions", json=BODY, headers=headers)
            answer = asyncio.create_task(posting)
            await stage.until(lambda: bool(stage.busy))
            (first_id,) = stage.busy
            stage.engines[first_id].die("killed by the test")
            assert num_tokens(await answer) == 40
        (second_id,) = stage.engines.keys() - {first_id}
        await stage.send_traces()
    (root,) = collector.named("POST /v1/completions")
    lost, last = collector.named("engine attempt")
    assert lost.parent_id == last.parent_id == root.span_id
    assert root.attributes["slicewise.resumes"] == 1
    assert not root.is_error
    assert lost.is_error
    assert lost.attributes["error.type"] == lost.attributes["slicewise.outcome"] == "lost"
    assert "killed by the test" in lost.attributes["slicewise.reason"]
    emitted = lost.attributes["slicewise.emitted_tokens"]
    assert emitted > 0
    assert (lost.attributes["slicewise.engine_id"], lost.attributes["slicewise.attempt"]) == (
        first_id,
        1,
    )
    assert not last.is_error
    assert last.attributes["slicewise.resume_cause"] == "lost"
    assert (last.attributes["slicewise.engine_id"], last.attributes["slicewise.attempt"]) == (
        second_id,
        2,
    )
    assert last.attributes["gen_ai.usage.output_tokens"] == 40
    assert "first_token" in last.events
    first_stay, second_stay = collector.named("engine")
    assert (first_stay.parent_id, second_stay.parent_id) == (lost.span_id, last.span_id)
    assert first_stay.attributes["slicewise.outcome"] == "lost"
    assert second_stay.attributes["slicewise.resumed_tokens"] == emitted
    # The client's id and the trace are in the lines of both ends.
    told = {record.getMessage().split()[0]: record.getMessage() for record in caplog.records}
    for event in ("request_resumed", "request_taken", "request"):
        assert "client-8" in told[event]
        assert f"trace_id={root.trace_id}" in told[event]
    assert f"from_engine={first_id} to_engine={second_id}" in told["request_resumed"]


async def test_request_that_waits_shows_where() -> None:
    async with traced(num_engines=0) as (stage, collector):
        async with client_of(stage.edge) as client:
            answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await stage.until(lambda: stage.model.num_queued == 1)
            await stage.start_engines(1)
            assert (await answer).status_code == 200
        await stage.send_traces()
    assert collector.tree()["admission"] == ["wait"]


async def test_refused_request_is_an_error_with_its_code() -> None:
    async with traced(num_engines=1) as (stage, collector):
        async with client_of(stage.edge) as client:
            answer = await client.post("/v1/completions", json=BODY | {"model": "other"})
        assert answer.status_code == 404
        await stage.send_traces()
    root, admission = collector.named("POST /v1/completions") + collector.named("admission")
    assert root.is_error
    assert root.attributes["error.type"] == "model_not_found"
    assert root.attributes["http.response.status_code"] == 404
    assert admission.attributes["slicewise.admission"] == "model_not_found"


async def test_client_that_leaves_leaves_no_span_open() -> None:
    async with traced(num_engines=1) as (stage, collector):
        body = json.dumps(BODY | {"max_tokens": 400}).encode()
        pending = [{"type": "http.request", "body": body, "more_body": False}]
        has_begun = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                has_begun.set()

        scope = post_scope(content_type="application/json") | {"query_string": b""}
        async with asyncio.timeout(DEADLINE_S):
            await stage.edge(scope, receive, send)
        await stage.send_traces()
    (root,), (attempt,), (stay,) = map(
        collector.named, ("POST /v1/completions", "engine attempt", "engine")
    )
    assert root.attributes["slicewise.client_left"] is True
    assert not root.is_error
    assert attempt.attributes["slicewise.outcome"] == "aborted"
    assert stay.attributes["slicewise.outcome"] == "aborted"
    assert stay.attributes["gen_ai.usage.output_tokens"] < 400


@pytest.mark.parametrize("sample_ratio", [None, 0.0])
async def test_request_that_is_not_sampled_sends_nothing(sample_ratio: float | None) -> None:
    with collecting() as (collector, endpoint):
        tracer: Tracer = NO_TRACER
        if sample_ratio is not None:
            tracer = tracer_to(endpoint, sample_ratio=sample_ratio)
        async with stage_for(tracer, 1, endpoint) as stage:
            async with client_of(stage.edge) as client:
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            await stage.send_traces()
            assert all(not tracer.counts.num_sent for tracer in stage.engine_tracers)
    assert collector.paths == set()


async def test_collector_that_is_away_changes_no_answer() -> None:
    # The port is of this machine and nobody listens: whoever closes it knows it is free.
    with collecting() as (_, endpoint):
        pass
    async with stage_for(tracer_to(endpoint), 1, endpoint) as stage:
        async with client_of(stage.edge) as client:
            answer = await client.post("/v1/completions", json=BODY)
        assert num_tokens(answer) == 40
        tracer = stage.tracer
    await asyncio.to_thread(tracer.join)  # type: ignore[attr-defined] # an `OtlpTracer`
    assert (tracer.counts.num_sent, tracer.counts.num_dropped) == (0, 3)


async def test_histograms_carry_the_trace_for_a_reader_of_open_metrics() -> None:
    async with traced(num_engines=1) as (stage, collector):
        async with client_of(stage.edge) as client:
            await client.post("/v1/completions", json=BODY)
            accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
            page = await client.get("/metrics", headers={"accept": accept})
            plain = await client.get("/metrics")
        await stage.send_traces()
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    assert plain.headers["content-type"].startswith("text/plain")
    assert "trace_id" not in plain.text
    traces = {
        sample.name: (sample.exemplar.labels["trace_id"], float(sample.exemplar.timestamp))
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    (root,) = collector.named("POST /v1/completions")
    assert traces.keys() == {
        "slicewise_time_to_first_token_seconds_bucket",
        "slicewise_time_per_output_token_seconds_bucket",
        "slicewise_request_duration_seconds_bucket",
    }
    for trace_id, at_s in traces.values():
        assert trace_id == root.trace_id
        assert root.start_ns / 1e9 - 0.1 <= at_s <= root.end_ns / 1e9 + 0.1
