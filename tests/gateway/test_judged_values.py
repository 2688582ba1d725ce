"""What vLLM made of a body is judged by the closed table once more, on every route.

The real frontend of vLLM over a scripted link, without the edge in front, which refuses the same
fields first (`test_refused_fields`).
"""

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import LateInteractionParams, PoolingParams

from serving.artifacts.model_source import resolve_source
from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.rules import EngineFacts
from serving.gateway.edge.fields import BodyJudge
from serving.gateway.model_version import ModelVersion

from .engines import ScriptedLink
from .test_http_edge import edge_over

pytestmark = [pytest.mark.imports_vllm, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60.0
MESSAGES = [{"role": "user", "content": "What is a slice?"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "A slice is", "max_tokens": 2},
    "/v1/responses": {"input": "What is a slice?", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
# What vLLM makes a field of which engines on TPU do not honour: the route, what of its body, the
# field that is named.
_CHAT, _COMPLETION, _RESPONSE, _MESSAGE = ROUTES
ASKED: list[tuple[str, dict[str, Any], str]] = [
    *[
        (path, {name: value}, name)
        for path in (_CHAT, _COMPLETION)
        for name, value in {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "min_p": "0.1",  # vLLM reads texts as numbers
            "seed": "7",
            "min_tokens": 2,
            "logit_bias": {"5": 2.0},
            "allowed_token_ids": [5, 6],
            "bad_words": ["x"],
            "watermarking": True,
            "routed_experts_prompt_start": 1,
        }.items()
    ],
    *[
        (_RESPONSE, {name: value}, name)
        for name, value in {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "min_p": 0.1,
            "seed": 7,
            "logit_bias": {"5": 2.0},
            "watermarking": True,
        }.items()
    ],
    (_CHAT, {"logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
    (_COMPLETION, {"logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
    (_MESSAGE, {"watermarking": True}, "watermarking"),
    (_COMPLETION, {"n": 2, "temperature": 0.5, "seed": 7}, "seed"),
]
NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "min_p": 0,
    "seed": -1,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "logprob_token_ids": [],
    "watermarking": False,
    "thinking_token_budget": None,
    "structured_outputs": None,
    "response_format": {"type": "text"},
    "routed_experts_prompt_start": 0,
    "top_k": 5,
    "top_p": 0.9,
    "temperature": 0.7,
}


def model(source: str = "models/slicewise-demo", **more: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "demo",
            "source": source,
            "engine": "vllm-tpu",
            "engine_args": {"max_model_len": 512, "dtype": "float32"},
            "deployments": (
                {"compute_class": "spot", "slice": {"generation": "v6e", "topology": "2x2"}},
            ),
        }
        | more
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[ModelVersion]:
    version = await ModelVersion.build(model(), GatewayConfig())
    yield version
    version.llm.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link(served: ModelVersion) -> ScriptedLink:
    return ScriptedLink(served.dispatcher)


async def answer_to(
    app: Any, link: ScriptedLink, path: str, body: dict[str, Any]
) -> tuple[httpx.Response, int]:
    """Returns the answer, and how many requests the engine got."""
    before = len(link.submitted)
    transport = httpx.ASGITransport(app=app)
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        asked = asyncio.create_task(client.post(path, json={"model": "demo", **body}))
        while not asked.done():
            link.step()
            await asyncio.sleep(0.001)
    return asked.result(), len(link.submitted) - before


@pytest.mark.parametrize(("path", "fields", "named"), ASKED)
async def test_value_that_engines_on_tpu_do_not_honour_is_refused_behind_vllms_own_reading(
    served: ModelVersion, link: ScriptedLink, path: str, fields: dict[str, Any], named: str
) -> None:
    answer, num_submitted = await answer_to(await served.app(), link, path, ROUTES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert f"{named}: it is a" in answer.text
    assert num_submitted == 0
    assert served.llm.num_in_flight == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_neutral_values_reach_the_engine(
    served: ModelVersion, link: ScriptedLink, path: str
) -> None:
    body = ROUTES[path] | (NEUTRAL if path != _MESSAGE else {"top_k": 5, "temperature": 0.5})
    answer, num_submitted = await answer_to(await served.app(), link, path, body)
    assert answer.status_code == 200, answer.text
    assert num_submitted == 1


async def test_refusal_behind_vllms_reading_has_its_code_at_the_edge(
    served: ModelVersion, link: ScriptedLink
) -> None:
    """The edge lets it through by a table of another kind, as another parser might."""

    class Behind:
        name, adapter_names, canary_of, is_broken = "demo", (), None, False
        body_judge = BodyJudge(EngineFacts(EngineKind.PACED))
        served_routes = served.served_routes

        async def enter(self, target: object) -> Any:
            return await served.app()

    edge = edge_over(Behind())  # type: ignore[arg-type]
    for path, fields, named in ASKED:
        answer, _ = await answer_to(edge, link, path, ROUTES[path] | fields)
        if named == "logprob_token_ids":  # paced engines have none either
            continue
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        if path != _MESSAGE:
            assert (error["param"], error["code"]) == (named, "unsupported_parameter")


async def test_penalty_of_the_model_itself_is_told_at_start_and_refuses_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "model"
    shutil.copytree(resolve_source("models/slicewise-demo"), source)
    settings = json.loads((source / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 1.05, "temperature": 0.6}
    (source / "generation_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        version = await ModelVersion.build(model(str(source)), GatewayConfig())
    (told,) = (r.getMessage() for r in caplog.records if "default_not_honoured" in r.getMessage())
    assert "model=demo field=repetition_penalty value=1.05" in told
    link = ScriptedLink(version.dispatcher)
    for path in ROUTES:
        answer, num_submitted = await answer_to(await version.app(), link, path, ROUTES[path])
        assert (answer.status_code, num_submitted) == (200, 1), answer.text
    body = ROUTES[_CHAT] | {"repetition_penalty": 1.2}
    answer, num_submitted = await answer_to(await version.app(), link, _CHAT, body)
    assert (answer.status_code, num_submitted) == (400, 0)
    version.llm.shutdown()


async def test_pooling_for_what_engines_on_tpu_lack_is_refused(served: ModelVersion) -> None:
    params = PoolingParams(
        task="token_embed", late_interaction_params=LateInteractionParams("cache_query", "q")
    )
    with pytest.raises(VLLMValidationError, match="do not score by late interaction"):
        served.llm.input_processor.process_inputs(
            "r", {"type": "token", "prompt_token_ids": [1]}, params, ("token_embed",)
        )


TOOL = {"type": "function", "function": {"name": "take", "parameters": {"type": "object"}}}
GRAMMARS: dict[str, tuple[str, dict[str, Any]]] = {
    "regex": (_COMPLETION, {"structured_outputs": {"regex": "[a-z]+"}}),
    "format of a chat": (_CHAT, {"response_format": {"type": "json_object"}}),
    "format of a response": (_RESPONSE, {"text": {"format": {"type": "json_object"}}}),
    "required tool": (_CHAT, {"tools": [TOOL], "tool_choice": "required"}),
}


@pytest.mark.parametrize(
    "more",
    [
        {
            "deployments": (
                {
                    "compute_class": "spot",
                    "slice": {"generation": "v6e", "topology": "2x2", "num_slices": 2},
                },
            )
        },
        {
            "engine_args": {
                "max_model_len": 512,
                "additional_config": {
                    "sharding": {"sharding_strategy": {"enable_dp_attention": True}}
                },
            }
        },
        {"engine_args": {"max_model_len": 512, "data_parallel_size": 2}},
    ],
    ids=["joined slices", "attention", "copies"],
)
async def test_grammar_is_refused_with_data_parallelism_and_a_free_tool_is_not(
    more: dict[str, Any],
) -> None:
    tools = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    version = await ModelVersion.build(model(frontend_args=tools, **more), GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    app = await version.app()
    for name, (path, fields) in GRAMMARS.items():
        answer, num_submitted = await answer_to(app, link, path, ROUTES[path] | fields)
        assert (answer.status_code, num_submitted) == (400, 0), name
        assert "keep no grammar" in answer.text
    free = ROUTES[_CHAT] | {"tools": [TOOL]}
    answer, num_submitted = await answer_to(app, link, _CHAT, free)
    assert (answer.status_code, num_submitted) == (200, 1), answer.text
    version.llm.shutdown()
