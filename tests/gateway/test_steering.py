"""What steers engines is closed by name, on every route, and a neutral value of it passes."""

import json
from typing import Any

import pytest

from serving.config.application import OpenField
from serving.gateway.edge.routes import MODEL_ROUTES

from .test_http_edge import EchoFrontend, client_of, edge_over

ROUTES = sorted(MODEL_ROUTES)
VALUES: dict[OpenField, Any] = {
    OpenField.VLLM_XARGS: {"mine": 1},
    OpenField.KV_TRANSFER_PARAMS: {"do_remote_prefill": True},
    OpenField.EC_TRANSFER_PARAMS: {"a": 1},
    OpenField.PRIORITY: -5,
    OpenField.MM_PROCESSOR_KWARGS: {"num_crops": 4096},
    OpenField.MEDIA_IO_KWARGS: {"video": {"num_frames": -1}},
}
HEADERS = {
    OpenField.PRIORITY: "X-Vllm-Priority",
    OpenField.DATA_PARALLEL_RANK: "X-data-parallel-rank",
}


def test_every_field_is_tried_here() -> None:
    assert VALUES.keys() | HEADERS.keys() == set(OpenField)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("field", VALUES)
async def test_closed_field_is_refused_by_name_and_an_opened_one_passes(
    path: str, field: OpenField
) -> None:
    frontend = EchoFrontend("m")
    body = {"model": "m", field: VALUES[field]}
    async with client_of(edge_over(frontend)) as client:
        answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert f"{field} steers engines" in error["message"]
    assert f"{field} in gateway.open_fields" in error["message"]
    assert frontend.num_admitted == 0
    async with client_of(edge_over(frontend, open_fields=frozenset({field}))) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert json.loads(answer.json()["body"]) == body


@pytest.mark.parametrize("field", VALUES)
@pytest.mark.parametrize("neutral", [None, {}, []])
async def test_neutral_value_passes(field: OpenField, neutral: object) -> None:
    async with client_of(edge_over(EchoFrontend("m"))) as client:
        answer = await client.post("/v1/completions", json={"model": "m", field: neutral})
        assert answer.status_code == 200


@pytest.mark.parametrize("value", [0, 0.0, -0.0, False])
async def test_priority_of_everybody_passes(value: float) -> None:
    async with client_of(edge_over(EchoFrontend("m"))) as client:
        answer = await client.post("/v1/completions", json={"model": "m", "priority": value})
        assert answer.status_code == 200


@pytest.mark.parametrize("value", [1, -1, 1e-300, "0", "a", True, [0]])
async def test_any_other_priority_is_refused(value: object) -> None:
    async with client_of(edge_over(EchoFrontend("m"))) as client:
        answer = await client.post("/v1/completions", json={"model": "m", "priority": value})
        assert answer.status_code == 400


async def test_last_of_two_values_is_the_one_that_counts_here_and_for_vllm() -> None:
    async with client_of(edge_over(EchoFrontend("m"))) as client:
        for first, last, status in ((0, -5, 400), (-5, 0, 200)):
            body = f'{{"model": "m", "priority": {first}, "priority": {last}}}'
            answer = await client.post("/v1/completions", content=body)
            assert answer.status_code == status, body


@pytest.mark.parametrize("field", HEADERS)
@pytest.mark.parametrize("value", ["-5", "1", "x"])
async def test_header_that_steers_is_refused_and_an_opened_one_passes(
    field: OpenField, value: str
) -> None:
    frontend, headers = EchoFrontend("m"), {HEADERS[field]: value}
    async with client_of(edge_over(frontend)) as client:
        answer = await client.post("/v1/completions", json={"model": "m"}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == HEADERS[field].lower()
    assert frontend.num_admitted == 0
    async with client_of(edge_over(frontend, open_fields=frozenset({field}))) as client:
        answer = await client.post("/v1/completions", json={"model": "m"}, headers=headers)
    assert answer.json()["headers"][HEADERS[field].lower()] == value


@pytest.mark.parametrize("value", ["0", "", " 0 "])
async def test_neutral_header_is_not_passed_on(value: str) -> None:
    headers = dict.fromkeys(HEADERS.values(), value)
    async with client_of(edge_over(EchoFrontend("m"))) as client:
        answer = await client.post("/v1/completions", json={"model": "m"}, headers=headers)
    assert answer.status_code == 200
    assert not {name.lower() for name in HEADERS.values()} & answer.json()["headers"].keys()
