"""`/openapi.json` describes what is served, to whom it is served, and nothing else."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serving.config.api_keys import read_keys
from serving.config.application import GatewayConfig, OpenField
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import HttpEdge
from serving.gateway.edge.routes import MODEL_ROUTES, OWN_ROUTES, READY
from serving.gateway.model_version import ModelVersion

from .test_forged_resume import CONFIG, ROUTES
from .test_http_edge import EchoFrontend, client_of, edge_over

pytestmark = pytest.mark.imports_vllm

ROOT = Path(__file__).parents[2]
GENERATING = {*ROUTES, "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
ALL = {*MODEL_ROUTES, *OWN_ROUTES, READY}


async def described(edge: HttpEdge, key: str = "") -> dict[str, Any]:
    async with client_of(edge) as client:
        answer = await client.get("/openapi.json", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def check(document: dict[str, Any], route: str, body: object) -> None:
    """Raises if the description does not allow this body."""
    request = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    schema = request["schema"] | {"components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(body)


def test_file_is_what_the_installed_vllm_says() -> None:
    # By itself, because the names of schemas depend on what else a process has made of the classes.
    command = [sys.executable, "-m", "scripts.describe_api", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


async def test_every_described_operation_is_served_and_no_other_method_or_route_is() -> None:
    edge = edge_over(EchoFrontend("one"))
    document = await described(edge)
    assert document["paths"].keys() == ALL
    async with client_of(edge) as client:
        for path, operations in document["paths"].items():
            (described_method,) = operations
            for method in ("get", "post", "put", "delete", "patch"):
                at = path.replace("{model}", "one").replace("{request_id}", "mine")
                headers = {"x-request-id": "mine"}
                answer = await client.request(method, at, json={"model": "one"}, headers=headers)
                assert (answer.status_code == 405) is (method != described_method), (method, path)
                assert answer.status_code != 404


@pytest.mark.parametrize("routes", [frozenset(), frozenset(GENERATING)])
async def test_only_routes_that_some_model_answers_are_described(routes: frozenset[str]) -> None:
    frontend = EchoFrontend("one")
    frontend.served_routes = routes
    document = await described(edge_over(frontend))
    assert document["paths"].keys() & MODEL_ROUTES == routes
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    # Without a route that needs them, no schemas of requests.
    assert bool(known - {"#/components/schemas/Error", "#/components/schemas/AnthropicError"}) is (
        bool(routes)
    )


async def test_built_model_answers_what_it_generates_with_and_none_of_vllms_own_operations() -> (
    None
):
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    assert version.served_routes & MODEL_ROUTES == GENERATING
    assert "/scale_elastic_ep" in version.served_routes  # which vLLM has, and we do not serve
    frontend = EchoFrontend("demo")
    frontend.served_routes = version.served_routes
    document = await described(edge_over(frontend))
    assert document["paths"].keys() == {*GENERATING, *OWN_ROUTES, READY}
    version.llm.shutdown()


@pytest.mark.parametrize("route", ROUTES)
async def test_request_names_a_model_that_is_served_and_has_no_closed_field(route: str) -> None:
    one, two = EchoFrontend("one", ("sql",)), EchoFrontend("two")
    document = await described(edge_over(one, two))
    for model in ("one", "sql", "two"):
        check(document, route, {"model": model, **ROUTES[route]})
    for body in ({"model": "three"}, {}):
        with pytest.raises(jsonschema.ValidationError):
            check(document, route, body | ROUTES[route])
    request = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][request["schema"]["$ref"].rpartition("/")[2]]
    assert not schema["properties"].keys() & set(OpenField)


async def test_opened_field_is_described() -> None:
    edge = edge_over(EchoFrontend("one"), open_fields=frozenset({OpenField.PRIORITY}))
    schema = (await described(edge))["components"]["schemas"]["ChatCompletionRequest"]
    assert schema["properties"].keys() & set(OpenField) == {"priority"}


async def test_holder_of_a_key_is_described_what_the_key_is_for() -> None:
    records = [
        {"name": "a", "key": "k1", "models": ["two"], "routes": ["/v1/completions"]},
        {"name": "b", "key": "k2", "scopes": ["metrics"]},
    ]
    keys = ApiKeys(read_keys(json.dumps({"keys": records})))
    edge = edge_over(EchoFrontend("one"), EchoFrontend("two"), keys=keys)
    limited, metrics = await described(edge, "k1"), await described(edge, "k2")
    listing = {"/v1/models", "/v1/models/{model}"}
    anybodys = {"/health", "/ready", "/openapi.json"}
    assert limited["paths"].keys() == {"/v1/completions", *listing, *anybodys}
    assert metrics["paths"].keys() == {"/metrics", *anybodys}
    check(limited, "/v1/completions", {"model": "two", "prompt": "a"})
    assert '"one"' not in json.dumps(limited)
    assert limited["security"] == [{"key": []}, {"anthropic": []}]
    async with client_of(edge) as client:
        assert (await client.get("/openapi.json")).status_code == 401


async def test_error_of_each_route_has_the_described_shape() -> None:
    edge = edge_over(EchoFrontend("one"))
    document = await described(edge)
    async with client_of(edge) as client:
        for route in MODEL_ROUTES:
            answer = await client.post(route, json={"model": "no such model"})
            responses = document["paths"][route]["post"]["responses"]
            schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
            whole = schema | {"components": document["components"]}
            jsonschema.Draft202012Validator(whole).validate(answer.json())
