"""The gateway's own routes and methods: what there is, and what the rest is answered with."""

import pytest

from serving.gateway.edge.routes import (
    MODEL_ROUTES,
    ONE_MODEL,
    ONE_REQUEST,
    OWN_ROUTES,
    part_of,
)

from .test_http_edge import EchoFrontend, client_of, edge_over

OWN = [*sorted(OWN_ROUTES.keys() - {ONE_MODEL, ONE_REQUEST}), "/v1/models/one"]
OWN += ["/fleet/requests/mine"]


@pytest.mark.parametrize("path", sorted(MODEL_ROUTES))
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
async def test_models_route_takes_only_post(path: str, method: str) -> None:
    frontend = EchoFrontend("one")
    async with client_of(edge_over(frontend)) as client:
        answer = await client.request(method, path, json={"model": "one"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error = answer.json()["error"]
    assert error["message"] == f"{path} has no method {method}. Allowed: POST."
    assert frontend.num_admitted == 0


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_own_route_is_only_read(path: str, method: str) -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
async def test_readiness_is_only_read_too(method: str) -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        answer = await client.request(method, "/ready")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", OWN)
async def test_own_route_is_read_by_get_and_head(path: str) -> None:
    async with client_of(edge_over(EchoFrontend("one"))) as client:
        headers = {"x-request-id": part_of(path, ONE_REQUEST)}
        await client.post("/v1/completions", json={"model": "one"}, headers=headers)
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics"])
async def test_wrong_method_without_a_key_is_401_first(path: str) -> None:
    async with client_of(edge_over(EchoFrontend("one"), keys=("k1",))) as client:
        assert (await client.delete(path)).status_code == 401


async def test_model_is_found_by_its_name_and_by_an_adapters() -> None:
    edge = edge_over(EchoFrontend("org/one", ("sql",)), EchoFrontend("two"))
    async with client_of(edge) as client:
        for path, name in (("org/one", "org/one"), ("org%2Fone", "org/one"), ("sql", "sql")):
            answer = await client.get(f"/v1/models/{path}")
            assert answer.json() == {"id": name, "object": "model"}
        missing = await client.get("/v1/models/three")
        empty = await client.get("/v1/models/")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert "Served here: org/one, sql, two." in missing.json()["error"]["message"]
    assert empty.status_code == 404


async def test_model_without_an_engine_keeps_nobody_from_finding_another() -> None:
    class Waiting(EchoFrontend):
        async def cards(self) -> list[dict[str, object]]:
            raise AssertionError("its cards are not needed")

    async with client_of(edge_over(EchoFrontend("one"), Waiting("two"))) as client:
        assert (await client.get("/v1/models/one")).json()["id"] == "one"


async def test_routes_of_models_are_one_label_however_they_are_named() -> None:
    edge = edge_over(EchoFrontend("one"))
    async with client_of(edge) as client:
        for name in ("one", "two", "made-up"):
            await client.get(f"/v1/models/{name}")
    assert edge.metrics.responses == {
        ("", "/v1/models/{model}", "200"): 1,
        ("", "/v1/models/{model}", "404"): 2,
    }
