"""A batch through vLLM's frontend to paced engines, while engines and gateways are lost."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from serving.config.application import BatchesConfig, GatewayConfig
from serving.gateway.batches.lane import BatchLane
from serving.gateway.batches.lines import LineLimits
from serving.gateway.batches.running.edge_caller import EdgeCaller
from serving.gateway.batches.running.job import JobSettings
from serving.gateway.batches.running.runner import BatchRunner
from serving.gateway.batches.running.threads import LaneThreads
from serving.gateway.batches.sqlite.store import SqliteBatchStore
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.telemetry.spans import NO_TRACER
from tests.gateway.test_http_edge import READY, ask_dashboard
from tests.gateway.test_request_traces import Stage, stage_for

from .lanes import begin, ended, records, turn_until, until

pytestmark = pytest.mark.imports_vllm

PATH = "/v1/completions"
NUM_LINES, NUM_TOKENS = 60, 12
LEASE_S = 1.0
DEADLINE_S = 120.0


def completions(num_lines: int, num_tokens: int = NUM_TOKENS) -> bytes:
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": PATH,
            "body": {"model": "demo", "prompt": [70 + number], "max_tokens": num_tokens},
        }
        for number in range(num_lines)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Owner:
    """An owner of batches that can be killed: then it does nothing more, and gives nothing back."""

    def __init__(self, folder: Path, edge: HttpEdge) -> None:
        self._store = SqliteBatchStore(folder)
        self._threads = LaneThreads(1)
        limits = LineLimits(NUM_LINES, 10_000)
        settings = JobSettings(limits, 8, LEASE_S, LEASE_S / 5, 3600.0)
        caller = EdgeCaller(edge.answer_line)
        runner = BatchRunner(
            self._store, caller, settings, "gw-0", 1, time.time, self._threads.jobs, 3600.0
        )
        self.counts = runner.counts
        self._task = asyncio.create_task(runner.run())

    async def die(self) -> None:
        self._store.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._threads.close()


class GatewayOfStage:
    """One more gateway before the engines of a stage, with a batch lane in a folder."""

    def __init__(self, stage: Stage, folder: Path, owner: str) -> None:
        config = BatchesConfig(folder=str(folder), lease_s=LEASE_S, lines_in_flight=8)
        self.lane = BatchLane(SqliteBatchStore(folder), config, GatewayConfig(), owner)
        self.edge = HttpEdge(
            {"demo": stage.model},
            EdgeRules(ApiKeys(()), 10_000),
            lambda _accept: asyncio.sleep(0, (b"", "text/plain")),
            lambda: {},
            ask_dashboard,
            lambda: READY,
            batches=self.lane.routes,
        )

    def start(self) -> None:
        self.lane.start(self.edge.answer_line)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(self.edge)) as http,
            AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=http) as client,
        ):
            yield client


async def test_each_line_is_answered_once_over_losses_of_engines_and_owner(
    tmp_path: Path,
) -> None:
    async with stage_for(NO_TRACER, num_engines=3) as stage:
        first, second = (GatewayOfStage(stage, tmp_path, name) for name in ("gw-1", "gw-2"))
        owner = Owner(tmp_path, first.edge)
        async with asyncio.timeout(DEADLINE_S), first.client() as client:
            batch_id = await begin(client, completions(NUM_LINES), endpoint=PATH)
            await until(client, batch_id, lambda each: each.request_counts.completed >= 10)
            await turn_until(lambda: bool(stage.busy))
            (busy, *_) = stage.busy
            stage.engines[busy].die("killed by the test")
            await until(client, batch_id, lambda each: each.request_counts.completed >= 20)
            await owner.die()
            second.start()
            await until(client, batch_id, lambda each: each.request_counts.completed >= 40)
            await turn_until(lambda: any(name != busy for name in stage.busy))
            other = next(name for name in stage.busy if name != busy)
            stage.engines[other].die("killed by the test")
        async with asyncio.timeout(DEADLINE_S), second.client() as client:
            batch = await ended(client, batch_id)
            answers = await records(client, batch.output_file_id)
        await second.lane.close()
        await first.lane.close()
    assert batch.status == "completed"
    assert batch.error_file_id is None
    ids = Counter(each["custom_id"] for each in answers)
    assert ids == Counter(f"line-{number}" for number in range(NUM_LINES))
    for each in answers:
        body = each["response"]["body"]
        assert body["usage"]["completion_tokens"] == NUM_TOKENS
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["service_tier"] == "flex"
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
    assert len(texts) == NUM_LINES
    assert batch.usage.output_tokens == NUM_LINES * NUM_TOKENS
    assert owner.counts.num_completed + second.lane.counts.num_completed <= NUM_LINES
    assert second.lane.counts.num_completed >= 20
