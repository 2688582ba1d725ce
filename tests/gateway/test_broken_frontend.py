"""A dead frontend answers nothing any more: its gateway says so, to Serve and to probes."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackEncoder

from serving.config.application import GatewayConfig
from serving.domain.errors import GatewayFaultError
from serving.domain.models.engine_kind import EngineKind
from serving.domain.tokens.paced import paced_token
from serving.gateway.model_version import ModelVersion
from serving.link.messages import TokenOutput
from serving.link.vllm_codec import encode_outputs

from .engines import TOKEN_RANGE, ScriptedLink
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


def with_likelihood(output: TokenOutput, token_id: int) -> TokenOutput:
    """That output, with the log-probability of this token."""
    ids, values = np.array([[token_id]], dtype=np.int32), np.array([[-1.0]], dtype=np.float32)
    told = EngineCoreOutput(
        output.request_id,
        output.token_ids,
        new_logprobs=LogprobsLists(ids, values, np.array([1])),
        finish_reason=None if output.finish is None else FinishReason(output.finish),
    )
    return encode_outputs([told], MsgpackEncoder())[0]


@pytest.mark.imports_vllm
async def test_output_that_cannot_be_read_ends_its_own_request_and_no_other() -> None:
    """tpu-inference named -1 as a token, which no tokenizer knows."""
    on_vllm = CONFIG.model_copy(update={"engine": EngineKind.VLLM})
    served = await ModelVersion.build(on_vllm, GatewayConfig())
    link = ScriptedLink(served.dispatcher)
    transport = httpx.ASGITransport(app=await served.app())
    asked_of = {"model": MODEL, "prompt": "a", "max_tokens": 3, "return_token_ids": True}
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):

        async def ask(number: int, **options: Any) -> httpx.Response:
            answering = asyncio.create_task(client.post("/v1/completions", json=asked_of | options))
            while len(link.submitted) < number:
                assert not answering.done(), answering.result().text
                await asyncio.sleep(0.01)
            return answering

        tokenizer = served.llm.renderer.tokenizer
        assert tokenizer is not None
        said = tokenizer.decode([paced_token(tokenizer.encode("a"), 0, TOKEN_RANGE)])
        first = await ask(1)
        stopped = await ask(2, stop=[said], max_tokens=50)
        bad = await ask(3, logprobs=0)
        last = await ask(4, logprobs=0)
        step = link.make_step()
        step.outputs[2] = with_likelihood(step.outputs[2], -1)
        step.outputs[3] = with_likelihood(step.outputs[3], step.outputs[3].token_ids[0])
        link.deliver(step)
        answer = await bad
        told = answer.json()["error"]["message"]
        assert (answer.status_code, told) == (500, GatewayFaultError.message)
        assert (await stopped).json()["choices"][0]["finish_reason"] == "stop"
        # It and the one whose stop string was found are no longer asked for.
        assert len(link.running) == 2
        for _ in range(2):
            step = link.make_step()
            step.outputs[-1] = with_likelihood(step.outputs[-1], step.outputs[-1].token_ids[0])
            link.deliver(step)
        for answering in (first, last):
            answer = await answering
            assert answer.status_code == 200
            assert len(answer.json()["choices"][0]["token_ids"]) == 3
        assert not served.is_broken
        assert served.dispatcher.num_in_flight == 0
    served.llm.shutdown()
