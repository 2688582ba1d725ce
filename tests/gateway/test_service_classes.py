"""Classes of service and deadlines, from a request's `service_tier` and headers to its engine."""

import asyncio
import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import ASGIApp

from serving.config.api_keys import read_keys
from serving.config.application import GatewayConfig
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.service_class import ServiceClass, ServiceTier
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.fields import judge_fields, read_fields
from serving.gateway.forks.bodies.messages import BodyRules, JudgedBody
from serving.gateway.model_version import ModelVersion

from .engines import ScriptedLink
from .test_forged_resume import CONFIG, ROUTES
from .test_http_edge import EchoFrontend, client_of, edge_over
from .test_separate_tenants import DEADLINE_S, ServedBy

INTERACTIVE, STANDARD, BATCH = ServiceClass
PATH = "/v1/chat/completions"


class Noting(EchoFrontend):
    """Writes down what the edge asks of the model."""

    def __init__(self) -> None:
        super().__init__("m")
        self.targets: list[RequestTarget] = []

    async def enter(self, target: RequestTarget) -> ASGIApp:
        self.targets.append(target)
        return await super().enter(target)


async def ask(
    body: dict[str, Any], headers: dict[str, str] | None = None, **record: Any
) -> tuple[httpx.Response, RequestTarget | None]:
    model = Noting()
    keys = read_keys(json.dumps({"keys": [{"name": "ci", "key": "k"} | record]})) if record else ()
    async with client_of(edge_over(model, keys=ApiKeys(keys))) as client:
        sent = {"Authorization": "Bearer k"} | (headers or {})
        answer = await client.post(PATH, json={"model": "m"} | body, headers=sent)
    return answer, model.targets[0] if model.targets else None


@pytest.mark.parametrize(
    ("tier", "service_class"),
    [
        ("priority", INTERACTIVE),
        ("scale", INTERACTIVE),
        ("default", STANDARD),
        ("standard_only", STANDARD),
        ("auto", STANDARD),
        (None, STANDARD),
        ("flex", BATCH),
    ],
)
async def test_a_tier_asks_for_a_class(tier: str | None, service_class: ServiceClass) -> None:
    answer, target = await ask({"service_tier": tier})
    assert answer.status_code == 200
    assert target is not None
    assert target.service_class is service_class


@pytest.mark.parametrize(
    ("value", "shown"), [("gold", "'gold'"), (7, "a number"), (["flex"], "a list"), ("", "''")]
)
async def test_a_tier_that_does_not_exist_is_refused_by_name(value: object, shown: str) -> None:
    answer, target = await ask({"service_tier": value})
    assert answer.status_code == 400
    assert target is None
    error = answer.json()["error"]
    assert error["param"] == "service_tier"
    assert shown in error["message"]
    assert "auto, priority, scale, default, standard_only, flex" in error["message"]


async def test_a_key_says_what_its_requests_may_ask_for() -> None:
    for tier, allowed in (("priority", False), ("flex", True), ("default", True)):
        answer, _ = await ask({"service_tier": tier}, tenant="t")
        assert answer.status_code == (200 if allowed else 403)
    error = (await ask({"service_tier": "priority"}, tenant="t"))[0].json()["error"]
    assert error == {
        "message": "The API key 'ci' is not for the service_tier 'priority'. "
        "Allowed: default, flex.",
        "type": "permission_error",
        "param": "service_tier",
        "code": "service_tier_not_allowed",
    }


@pytest.mark.parametrize(
    ("tiers", "service_class"),
    [(["flex"], BATCH), (["priority"], INTERACTIVE), (["priority", "default"], STANDARD)],
)
async def test_what_asks_for_nothing_is_of_what_its_key_has(
    tiers: list[str], service_class: ServiceClass
) -> None:
    for body in ({}, {"service_tier": "auto"}):
        answer, target = await ask(body, service_tiers=tiers)
        assert answer.status_code == 200
        assert target is not None
        assert target.service_class is service_class


async def test_a_client_says_when_it_needs_the_first_token() -> None:
    for value, patience_s in (("1500", 1.5), (" 0.5 ", 0.0005), ("3600000", 3600.0)):
        _, target = await ask({}, {"X-SLO-TTFT-Ms": value})
        assert target is not None
        assert target.patience_s == patience_s
    for value in ("0", "-1", "soon", "nan", "inf", "3600001", ""):
        answer, target = await ask({}, {"X-SLO-TTFT-Ms": value})
        assert answer.status_code == 400
        assert target is None
        error = answer.json()["error"]
        assert error["param"] == "x-slo-ttft-ms"
        assert "more than 0 and at most 3,600,000" in error["message"]


def test_a_large_body_that_is_judged_in_a_fork_keeps_its_tier() -> None:
    fields = read_fields(json.dumps({"model": "m", "service_tier": "flex"}).encode())
    judged = judge_fields(PATH, fields, BodyRules(frozenset(), 1, 1))
    sent = msgspec.msgpack.encode(judged)
    assert msgspec.msgpack.decode(sent, type=JudgedBody).service_tier is ServiceTier.FLEX


# -- down to the engine, through vLLM's frontend --


async def built() -> ModelVersion:
    model = CONFIG.model_copy(update={"engine": EngineKind.VLLM, "paced": None})
    return await ModelVersion.build(model, GatewayConfig())


@pytest.mark.imports_vllm
async def test_engines_get_the_classes_in_their_order() -> None:
    version = await built()
    link = ScriptedLink(version.dispatcher, places=0)
    tiers = ["flex", "default", "priority", "flex", "auto", "priority"]
    async with asyncio.timeout(DEADLINE_S), client_of(edge_over(ServedBy(version))) as client:
        asked = []
        for number, tier in enumerate(tiers):
            body = {"model": "demo", "prompt": [number + 1], "max_tokens": 1, "service_tier": tier}
            asked.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            while version.dispatcher.num_waiting <= number:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert version.dispatcher.num_waiting_of == {INTERACTIVE: 2, STANDARD: 2, BATCH: 2}
        link.places = len(tiers)
        link.tell()
        order = [request.prompt_token_ids[0] - 1 for request in link.submitted]
        assert [tiers[each] for each in order] == [
            "priority", "priority", "default", "auto", "flex", "flex",
        ]  # fmt: skip
        link.step()
        assert {(await answer).status_code for answer in asked} == {200}
    version.llm.shutdown()


@pytest.mark.imports_vllm
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_no_room_in_its_time_is_told_so_on_every_route(
    path: str, *, stream: bool
) -> None:
    version = await built()
    ScriptedLink(version.dispatcher, places=0)
    async with asyncio.timeout(DEADLINE_S), client_of(edge_over(ServedBy(version))) as client:
        body = {"model": "demo", "stream": stream, **ROUTES[path]}
        answer = await client.post(path, json=body, headers={"X-SLO-TTFT-Ms": "50"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert re.match(r"No engine of 'demo' had room within \d\.\d s; retry", error["message"])
    if path == "/v1/messages":
        assert error["type"] == "rate_limit_error"
    else:
        assert (error["type"], error["code"]) == ("rate_limit_error", "no_room_in_time")
    version.llm.shutdown()
