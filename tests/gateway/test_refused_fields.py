"""A field that no engine honours, or no client may set: 400 that names it, no engine is asked."""

import json
from typing import Any

import pytest

from serving.config.application import OpenField
from serving.domain.errors import MalformedRequestError
from serving.gateway.edge.fields import (
    ON_TPU,
    ON_TPU_WITHOUT_PROMPT_LOGPROBS,
    PROMPT_LOGPROBS,
    check_fields,
    check_shapes,
    read_fields,
)

from .test_http_edge import EchoFrontend, client_of, edge_over

GENERATE_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("value", ["0", "7", '"x"', " 12 ", "[1]"])
def test_seed_is_refused_whatever_it_is(value: str) -> None:
    with pytest.raises(MalformedRequestError, match="no seed per request") as caught:
        check_fields(b'{"prompt": "a", "seed": %s}' % value.encode(), ON_TPU)
    assert (caught.value.param, caught.value.status) == ("seed", 400)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "seed"}',
        b'{"seed": null}',
        b'{"x": {"seed": 1}}',
        b'{"allowed_token_ids": null, "logprob_token_ids": [ ]}',
        b'{"logprobs": 0, "prompt_logprobs": 1, "echo": true}',
        b"[]",
        b"{",
        b"",
    ],
)
def test_what_sets_no_seed_passes(body: bytes) -> None:
    check_fields(body, ON_TPU)


def test_any_field_passes_where_none_is_refused() -> None:
    check_fields(b'{"seed": 1}', {})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_seed_to_a_model_on_tpu_is_answered_with_400_that_says_so(path: str) -> None:
    tpu = EchoFrontend("tpu", ("adapter",))
    tpu.refused_fields = ON_TPU
    async with client_of(edge_over(tpu, EchoFrontend("cpu"))) as client:
        for name in ("tpu", "adapter"):
            answer = await client.post(path, json={"model": name, "seed": 1, "stream": True})
            assert answer.status_code == 400
            assert answer.json()["error"] == {
                "message": ON_TPU["seed"],
                "type": "invalid_request_error",
                "param": "seed",
                "code": "unsupported_parameter",
            }
        assert tpu.num_admitted == 0
        assert (await client.post(path, json={"model": "cpu", "seed": 1})).status_code == 200
        assert (await client.post(path, json={"model": "tpu"})).status_code == 200


@pytest.mark.parametrize("field", ["allowed_token_ids", "logprob_token_ids"])
@pytest.mark.parametrize("value", [[5], [1, 2, 3], 7, "x"])
async def test_field_that_ends_an_engine_on_tpu_is_refused_with_400(
    field: str, value: object
) -> None:
    tpu = EchoFrontend("tpu")
    tpu.refused_fields = ON_TPU
    async with client_of(edge_over(tpu)) as client:
        for path in GENERATE_ROUTES:
            answer = await client.post(path, json={"model": "tpu", field: value})
            assert answer.status_code == 400, path
            assert ON_TPU[field] in answer.text
    assert tpu.num_admitted == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "prompt_logprobs": 0}', "prompt_logprobs"),
        (b'{"prompt": "a", "echo": true, "logprobs": 0}', "echo"),
        (b'{"messages": [], "echo": true}', "echo"),
    ],
)
def test_prompt_logprobs_are_refused_where_they_end_the_engine(body: bytes, param: str) -> None:
    reason = ON_TPU_WITHOUT_PROMPT_LOGPROBS[PROMPT_LOGPROBS]
    with pytest.raises(MalformedRequestError, match=reason[:40]) as caught:
        check_fields(body, ON_TPU_WITHOUT_PROMPT_LOGPROBS)
    assert caught.value.param == param
    check_fields(body, ON_TPU)


@pytest.mark.parametrize(
    "body", [b'{"prompt": "a", "echo": true}', b'{"messages": [], "echo": false, "logprobs": true}']
)
def test_what_makes_no_prompt_logprobs_passes(body: bytes) -> None:
    check_fields(body, ON_TPU_WITHOUT_PROMPT_LOGPROBS)


@pytest.mark.parametrize("path", GENERATE_ROUTES)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"slicewise_emitted_token_ids": 1.5}, "slicewise_emitted_token_ids"),
        ({"mine": 1, "slicewise_emitted_token_ids": [5]}, "slicewise_emitted_token_ids"),
        ({"slicewise_": "x"}, "slicewise_"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params"),
        ({"ec_transfer_params": 1}, "ec_transfer_params"),
    ],
)
async def test_request_that_carries_what_is_not_its_clients_is_refused_with_400(
    path: str, arguments: dict[str, Any], named: str
) -> None:
    frontend = EchoFrontend("m")
    # Nobody but the engine may set these, though an operator has opened the field.
    edge = edge_over(frontend, open_fields=frozenset({OpenField.VLLM_XARGS}))
    async with client_of(edge) as client:
        answer = await client.post(path, json={"model": "m", "vllm_xargs": arguments})
        assert answer.status_code == 400
        assert named in answer.text
        assert "leave it out" in answer.text
        assert frontend.num_admitted == 0
        allowed = {"model": "m", "vllm_xargs": {"mine": 1}}
        assert (await client.post(path, json=allowed)).status_code == 200


@pytest.mark.parametrize("request_id", ["", "a b", "a\n", "x" * 129, "x" * 900, "é"])
async def test_request_id_that_every_token_would_carry_is_of_some_length(request_id: str) -> None:
    frontend = EchoFrontend("m")
    async with client_of(edge_over(frontend)) as client:
        for path in GENERATE_ROUTES:
            answer = await client.post(path, json={"model": "m", "request_id": request_id})
            assert answer.status_code == 400, path
            assert "allowed: 1 to 128" in answer.text
            assert len(answer.text) < 500
            fit = {"model": "m", "request_id": "resp_0-9.a:b"}
            assert (await client.post(path, json=fit)).status_code == 200


@pytest.mark.parametrize("path", GENERATE_ROUTES)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("a", "a text"),
        ([1.5], "a list"),
        ([], "a list"),
        (0, "a number"),
        (1e308, "a number"),
        (True, "a boolean"),
    ],
)
async def test_structured_outputs_that_are_no_object_are_refused(
    path: str, value: object, kind: str
) -> None:
    """Each was a 500 of vLLM's."""
    frontend = EchoFrontend("m")
    async with client_of(edge_over(frontend)) as client:
        answer = await client.post(path, json={"model": "m", "structured_outputs": value})
        assert answer.status_code == 400
        assert f"structured_outputs: it is {kind}; allowed: an object" in answer.text
        assert frontend.num_admitted == 0
        for fit in (None, {"json": "{}"}):
            body = {"model": "m", "structured_outputs": fit}
            assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("content", "is_refused"),
    [
        ([], True),
        ([{"type": "refusal", "refusal": "no"}], True),
        ([{"type": "output_text", "text": "yes"}], False),
        ("yes", False),
    ],
)
def test_answer_sent_back_without_a_text_is_refused(content: object, *, is_refused: bool) -> None:
    items = [{"role": "user", "content": []}, {"role": "assistant", "content": content}]
    fields = read_fields(json.dumps({"input": items}).encode())
    if not is_refused:
        check_shapes(fields)
        return
    with pytest.raises(MalformedRequestError, match=r"input\[1\]\.content: it begins with no text"):
        check_shapes(fields)


@pytest.mark.parametrize("value", ['{"a":' * 900 + "1" + "}" * 900, "1" * 400, "[]"])
def test_input_that_is_odd_in_another_way_is_left_to_vllm(value: str) -> None:
    check_shapes(read_fields(b'{"input": [{"role": %s}]}' % value.encode()))
