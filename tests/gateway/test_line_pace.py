"""The pace that lines keep to is that of engines over real links, as their hosts tell it."""

import asyncio

import httpx
import pytest

from serving.domain.capacity.batch_lines import STEP_SHARE
from serving.domain.capacity.objectives import ObjectivesConfig
from serving.telemetry.spans import NO_TRACER

from .test_http_edge import client_of
from .test_request_traces import BODY, DEADLINE_S, PACE, Stage, stage_for

pytestmark = pytest.mark.imports_vllm

OBJECTIVES = ObjectivesConfig(ttft_s=1.0, tpot_s=0.02)


async def ask_again_and_again(http: httpx.AsyncClient) -> None:
    while True:
        answer = await http.post("/v1/completions", json=BODY | {"max_tokens": 400})
        answer.raise_for_status()


async def pace_under(stage: Stage, num_streams: int) -> None:
    """Waits until the model has a pace, under streams without a break."""
    async with client_of(stage.edge) as http:
        streams = [asyncio.create_task(ask_again_and_again(http)) for _ in range(num_streams)]
        try:
            async with asyncio.timeout(DEADLINE_S):
                while stage.model.line_pace() is None:
                    for each in streams:
                        assert not each.done()
                    await asyncio.sleep(0.05)
        finally:
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def test_pace_is_of_the_steps_that_engines_make_and_their_sequences() -> None:
    async with stage_for(NO_TRACER, 2, objectives=OBJECTIVES) as stage:
        assert stage.model.line_pace() is None
        await pace_under(stage, 6)
        pace = stage.model.line_pace()
        assert pace is not None
        assert pace.most_s == STEP_SHARE * OBJECTIVES.tpot_s
        # One may just be between two answers.
        assert 4 <= pace.num_sequences <= 6
        # A machine that is busy makes steps longer, and never shorter.
        assert pace.step_s >= 0.99 * PACE.time_per_token_s


async def test_model_without_objectives_has_no_pace() -> None:
    async with stage_for(NO_TRACER, 1) as stage:
        assert stage.model.line_pace() is None
