"""What a key may do at the edge: models, routes, scopes and expiry, each refused by name."""

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from serving.config.api_keys import ModelRoute, read_keys
from serving.domain.errors import ExpiredKeyError
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import HttpEdge

from .test_http_edge import EchoFrontend, canary_of, client_of, edge_over

SECRET = "sk-0123456789"
NOW_S = 1_800_000_000.0


def keys_with(**record: Any) -> ApiKeys:
    return ApiKeys(read_keys(json.dumps({"keys": [{"name": "ci", "key": SECRET} | record]})))


def edge_with(*frontends: EchoFrontend, **record: Any) -> HttpEdge:
    return edge_over(*(frontends or (EchoFrontend("one"),)), keys=keys_with(**record))


async def ask(
    edge: HttpEdge, path: str, body: dict[str, Any] | None = None, method: str = ""
) -> httpx.Response:
    async with client_of(edge) as client:
        answer = await client.request(
            method or ("GET" if body is None else "POST"),
            path,
            json=body,
            headers={"Authorization": f"Bearer {SECRET}"},
        )
    assert answer.status_code == 200 or SECRET not in answer.text
    return answer


# -- models --


async def test_key_is_refused_a_model_that_it_is_not_for_whether_or_not_it_is_served() -> None:
    one = EchoFrontend("one", ("sql",))
    edge = edge_with(one, EchoFrontend("two"), models=["two", "sql"])
    for name in ("one", "no-such-model"):
        answer = await ask(edge, "/v1/chat/completions", {"model": name})
        assert answer.status_code == 403
        assert answer.json()["error"] == {
            "message": f"The API key 'ci' is not for the model '{name}'. Allowed: sql, two.",
            "type": "permission_error",
            "param": "model",
            "code": "model_not_allowed",
        }
    assert one.num_admitted == 0
    for name, frontend in (("two", "two"), ("sql", "one")):
        answer = await ask(edge, "/v1/chat/completions", {"model": name})
        assert answer.json()["frontend"] == frontend


async def test_last_of_two_model_fields_is_the_one_that_is_judged_and_asked() -> None:
    edge = edge_with(EchoFrontend("one"), EchoFrontend("two"), models=["two"])
    async with client_of(edge) as client:
        for body, status in (
            (b'{"model": "two", "model": "one"}', 403),
            (b'{"model": "two", "mod\\u0065l": "one"}', 403),
            (b'{"model": "one", "mod\\u0065l": "two"}', 200),
        ):
            headers = {"Authorization": f"Bearer {SECRET}"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, body
            assert status == 403 or answer.json()["frontend"] == json.loads(body)["model"]


async def test_model_that_is_allowed_and_not_served_is_404_with_those_allowed() -> None:
    edge = edge_with(EchoFrontend("one"), EchoFrontend("two"), models=["two", "gone"])
    answer = await ask(edge, "/v1/completions", {"model": "gone"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model 'gone' does not exist. Served here: two."


@pytest.mark.parametrize(("models", "status"), [(["one"], 200), (["sql"], 400)])
async def test_request_without_a_model_gets_only_one_that_the_key_is_for(
    models: list[str], status: int
) -> None:
    answer = await ask(edge_with(EchoFrontend("one", ("sql",)), models=models), "/tokenize", {})
    assert answer.status_code == status
    if status == 400:
        assert "No model is named. Allowed: sql." in answer.json()["error"]["message"]


async def test_canary_answers_for_a_model_that_is_allowed_and_not_by_its_own_name() -> None:
    edge = edge_with(EchoFrontend("one"), canary_of("one", 1.0), models=["one"])
    assert (await ask(edge, "/v1/completions", {"model": "one"})).json()["frontend"] == "one-next"
    assert (await ask(edge, "/v1/completions", {"model": "one-next"})).status_code == 403


async def test_models_are_listed_and_found_only_where_the_key_is_for_them() -> None:
    frontends = EchoFrontend("one", ("sql", "law")), EchoFrontend("two")
    edge = edge_with(*frontends, models=["law", "two"])
    listed = (await ask(edge, "/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["law", "two"]
    assert (await ask(edge, "/v1/models/law")).json() == {"id": "law", "object": "model"}
    for name in ("one", "sql", "no-such"):
        answer = await ask(edge, f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.json()["error"]["message"].endswith("Served here: law, two.")


# -- routes and scopes --


@pytest.mark.parametrize("path", sorted(map(str, ModelRoute)))
async def test_key_is_refused_every_models_route_that_it_is_not_for(path: str) -> None:
    others = [route for route in ModelRoute if route != path]
    refused = await ask(edge_with(routes=others), path, {"model": "one"})
    error = refused.json()["error"]
    assert refused.status_code == 403
    assert error["message"].startswith(f"The API key 'ci' is not for the route {path!r}. Allowed: ")
    assert error["type"] == "permission_error"
    assert (await ask(edge_with(routes=[path]), path, {"model": "one"})).status_code == 200


SCOPES = {
    "/v1/models": "inference",
    "/v1/models/one": "inference",
    "/metrics": "metrics",
    "/fleet": "fleet",
    "/fleet/history": "fleet",
}


@pytest.mark.parametrize("path", SCOPES)
@pytest.mark.parametrize("scope", ["inference", "metrics", "fleet"])
async def test_each_of_our_own_routes_has_a_scope(path: str, scope: str) -> None:
    answer = await ask(edge_with(scopes=[scope]), path)
    if scope == SCOPES[path]:
        assert answer.status_code == 200
        return
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "scope_not_allowed"
    assert f"is not for the scope '{SCOPES[path]}'. Allowed: {scope}." in error["message"]


@pytest.mark.parametrize("scope", ["metrics", "fleet"])
async def test_key_that_is_not_for_inference_asks_no_model(scope: str) -> None:
    one = EchoFrontend("one")
    answer = await ask(edge_with(one, scopes=[scope]), "/v1/messages", {"model": "one"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert "'inference'" in answer.json()["error"]["message"]
    assert one.num_admitted == 0


async def test_plain_key_may_do_everything() -> None:
    edge = edge_over(EchoFrontend("one"), keys=(SECRET,))
    for path in SCOPES:
        assert (await ask(edge, path)).status_code == 200
    assert (await ask(edge, "/v1/completions", {"model": "one"})).status_code == 200


# -- fields that steer engines --


@pytest.mark.parametrize(("opened", "status"), [([], 400), (["priority"], 200)])
async def test_key_opens_fields_for_its_own_requests(opened: list[str], status: int) -> None:
    edge = edge_with(open_fields=opened)
    answer = await ask(edge, "/v1/completions", {"model": "one", "priority": -1})
    assert answer.status_code == status
    assert status == 200 or "in gateway.open_fields, or for one key" in answer.text
    described = (await ask(edge, "/openapi.json")).json()["components"]["schemas"]
    assert ("priority" in described["CompletionRequest"]["properties"]) is bool(opened)


# -- expiry --


def test_key_passes_until_the_moment_at_which_it_ends() -> None:
    keys = keys_with(expires_at=datetime.fromtimestamp(NOW_S, UTC).isoformat())
    assert keys.check(SECRET, NOW_S - 0.001).name == "ci"
    with pytest.raises(ExpiredKeyError, match="'ci' expired at 2027-01-15T08:00:00Z"):
        keys.check(SECRET, NOW_S)


@pytest.mark.parametrize(("hours", "status"), [(-1, 401), (1, 200)])
async def test_expired_key_is_401_on_every_route_and_says_when_it_ended(
    hours: int, status: int
) -> None:
    ends = datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=hours)
    edge = edge_with(expires_at=ends.isoformat(), scopes=["inference", "fleet", "metrics"])
    for path, body in (*((path, None) for path in SCOPES), ("/v1/completions", {"model": "one"})):
        answer = await ask(edge, path, body)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["code"] == "expired_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert (await ask(edge, "/health")).status_code == 200


# -- on whose account --


async def test_refusals_are_on_the_account_of_the_keys_tenant() -> None:
    edge = edge_with(tenant="acme", models=["one"])
    await ask(edge, "/v1/completions", {"model": "one"})
    await ask(edge, "/v1/completions", {"model": "two"})
    assert edge.metrics.admissions == {
        ("one", "admitted", "acme"): 1,
        ("", "model_not_allowed", "acme"): 1,
    }
