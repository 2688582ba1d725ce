"""What `usage` says of cached tokens: once, and of the client's own prompt, whoever the engine is.

Behind vLLM's own frontend, over scripted links: a stream that moves is computed anew, prompt and
emitted tokens, and its second engine may find more of them than the prompt has.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackEncoder

from serving.config.application import GatewayConfig
from serving.domain.models.engine_kind import EngineKind
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.model_version import ModelVersion
from serving.link.messages import Finish, Step, TokenOutput
from serving.link.vllm_codec import encode_outputs

from .engines import ScriptedLink
from .test_forged_resume import CONFIG
from .test_http_edge import client_of, edge_over
from .test_separate_tenants import DEADLINE_S, ServedBy

pytestmark = pytest.mark.imports_vllm

PROMPT = [7, 8, 9, 10, 11]
# Makes an output that says how many tokens were cached.
Tells = Callable[[str, int], TokenOutput]


def tells_as_vllm(wire_id: str, num_cached: int) -> TokenOutput:
    stats = PrefillStats(num_prompt_tokens=len(PROMPT), num_cached_tokens=num_cached)
    (output,) = encode_outputs(
        [EngineCoreOutput(wire_id, [65], prefill_stats=stats)], MsgpackEncoder()
    )
    return output


def tells_as_paced(wire_id: str, num_cached: int) -> TokenOutput:
    return TokenOutput(wire_id, [65], num_cached=num_cached)


async def usage_of(
    told: list[tuple[Tells, int, int]], *, stream: bool
) -> tuple[dict[str, Any], float]:
    """Asks engines in turn, of which each is lost when it has given so many tokens.

    The first output of each says how many were cached. Returns the answer's usage, and the cached
    tokens in the gateway's metrics.
    """
    model = CONFIG.model_copy(
        update={
            "engine": EngineKind.VLLM,
            "paced": None,
            "frontend_args": CONFIG.frontend_args | {"enable_prompt_tokens_details": True},
        }
    )
    version = await ModelVersion.build(model, GatewayConfig())
    body: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    edge = edge_over(ServedBy(version), keys=ApiKeys([]))
    async with asyncio.timeout(DEADLINE_S), client_of(edge) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        link = ScriptedLink(version.dispatcher, "e0")
        for number, (tells, num_cached, num_tokens) in enumerate(told):
            while not link.running:
                assert not asked.done(), asked.result().text
                await asyncio.sleep(0.005)
            (wire_id,) = link.running
            steps = [tells(wire_id, num_cached)] if num_tokens else []
            steps += [TokenOutput(wire_id, [66]) for _ in range(num_tokens - 1)]
            if number == len(told) - 1:
                steps.append(TokenOutput(wire_id, [67], int(Finish.LENGTH)))
            for output in steps:
                version.dispatcher.take_step(f"e{number}", Step([output]))
            if number < len(told) - 1:
                next_link = ScriptedLink(version.dispatcher, f"e{number + 1}")
                link.end()
                link = next_link
        text = (await asked).text
    counted = sum(
        each.cached_tokens for each in version.dispatcher.telemetry.metrics.classes.values()
    )
    version.llm.shutdown()
    if not stream:
        return json.loads(text)["usage"], counted
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return chunks[-1]["usage"], counted


@pytest.mark.parametrize("tells", [tells_as_vllm, tells_as_paced])
async def test_cached_tokens_of_a_prompt_are_told_whoever_the_engine_is(tells: Tells) -> None:
    usage, counted = await usage_of([(tells, 4, 3)], stream=False)
    assert usage["prompt_tokens_details"]["cached_tokens"] == counted == 4
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tells", [tells_as_vllm, tells_as_paced])
async def test_what_a_second_engine_finds_of_a_stream_is_not_told_as_cached(
    tells: Tells, *, stream: bool
) -> None:
    """It finds the prompt and three tokens that the client has, which is more than the prompt."""
    usage, counted = await usage_of([(tells, 4, 3), (tells, 8, 3)], stream=stream)
    assert usage["prompt_tokens_details"]["cached_tokens"] == counted == 4
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 7)


async def test_request_that_moved_before_its_first_token_is_told_what_its_own_engine_had() -> None:
    usage, _ = await usage_of([(tells_as_vllm, 0, 0), (tells_as_vllm, 3, 2)], stream=False)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 3)
