"""A field that no engine honours, or no client may set: 400 that names it, no engine is asked."""

import json
from typing import Any

import pytest

from serving.config.application import OpenField
from serving.domain.errors import MalformedRequestError
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.refusals import BODY_FIELDS
from serving.domain.models.request_fields.routes import UNREAD
from serving.domain.models.request_fields.rules import EngineFacts, Trait
from serving.gateway.edge.fields import BodyJudge, check_fields, check_shapes, read_fields
from serving.gateway.edge.routes import ANTHROPIC_ROUTES, ENGINELESS_ROUTES, MODEL_ROUTES

from .test_http_edge import EchoFrontend, client_of, edge_over

GENERATE_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


CPU = EngineFacts(EngineKind.VLLM, frozenset({Trait.LISTS_NO_EXPERTS}))
TPU = EngineFacts(EngineKind.VLLM_TPU)
PACED = EngineFacts(EngineKind.PACED)


def check(body: bytes, facts: EngineFacts, path: str = "/v1/completions") -> None:
    check_fields(read_fields(body), BodyJudge(facts), path)


@pytest.mark.parametrize("value", ["0", "7", '"x"', " 12 ", "[1]", "false", "-1.5"])
def test_seed_is_refused_whatever_it_is(value: str) -> None:
    with pytest.raises(MalformedRequestError, match="no seed per request") as caught:
        check(b'{"prompt": "a", "seed": %s}' % value.encode(), TPU)
    assert (caught.value.param, caught.value.status) == ("seed", 400)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "seed"}',
        b'{"seed": null}',
        b'{"x": {"seed": 1}}',
        b'{"allowed_token_ids": null, "logprob_token_ids": [ ]}',
        b'{"logprobs": 0, "prompt_logprobs": 1, "echo": true}',
        b"{}",
    ],
)
def test_what_sets_no_seed_passes(body: bytes) -> None:
    check(body, TPU)


def test_field_passes_where_it_is_honoured() -> None:
    check(b'{"seed": 1, "min_p": 0.1, "logit_bias": {"5": 1}, "bad_words": ["x"]}', CPU)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_seed_to_a_model_on_tpu_is_answered_with_400_that_says_so(path: str) -> None:
    tpu = EchoFrontend("tpu", ("adapter",))
    tpu.body_judge = BodyJudge(TPU)
    async with client_of(edge_over(tpu, EchoFrontend("cpu"))) as client:
        for name in ("tpu", "adapter"):
            answer = await client.post(path, json={"model": name, "seed": 1, "stream": True})
            assert answer.status_code == 400
            assert answer.json()["error"] == {
                "message": "seed: it is a number; engines on TPU have no seed per request. "
                "Allowed: -1, or leave it out; temperature 0 gives output that repeats.",
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
    tpu.body_judge = BodyJudge(TPU)
    async with client_of(edge_over(tpu)) as client:
        for path in GENERATE_ROUTES:
            answer = await client.post(path, json={"model": "tpu", field: value})
            assert answer.status_code == 400, path
            assert f"{field}: it is " in answer.text
    assert tpu.num_admitted == 0


# A value of every field of bodies that some engine refuses, and who refuses it.
ASKED: dict[str, tuple[object, set[EngineKind]]] = {
    "presence_penalty": (0.5, {EngineKind.VLLM_TPU}),
    "frequency_penalty": (-0.5, {EngineKind.VLLM_TPU}),
    "repetition_penalty": (1.05, {EngineKind.VLLM_TPU}),
    "watermarking": (True, {EngineKind.VLLM, EngineKind.VLLM_TPU}),
    "min_p": (0.1, {EngineKind.VLLM_TPU}),
    "seed": (7, {EngineKind.VLLM_TPU}),
    "stop_token_ids": ([7], set()),
    "ignore_eos": (True, set()),
    "max_tokens": (7, set()),
    "repetition_detection": ({"max_pattern_size": 2, "min_count": 3}, set()),
    "min_tokens": (5, {EngineKind.VLLM_TPU}),
    "logprobs": (0, {EngineKind.PACED}),
    "top_logprobs": (3, {EngineKind.PACED}),
    "prompt_logprobs": (0, {EngineKind.PACED}),
    "prompt_logprob_token_ids": ([[1]], set(EngineKind)),
    "prompt_logprob_start": (0, set(EngineKind)),
    "logprob_token_ids": ([5], {EngineKind.VLLM_TPU, EngineKind.PACED}),
    "flat_logprobs": (True, set(EngineKind)),
    "structured_outputs": ({"regex": "a"}, set()),
    "response_format": ({"type": "json_object"}, set()),
    "logit_bias": ({"5": 2.0}, {EngineKind.VLLM_TPU}),
    "allowed_token_ids": ([5, 6], {EngineKind.VLLM_TPU}),
    "bad_words": (["x"], {EngineKind.VLLM_TPU}),
    "thinking_token_budget": (50, {EngineKind.VLLM_TPU}),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {EngineKind.VLLM_TPU}),
    "routed_experts_prompt_start": (3, {EngineKind.VLLM, EngineKind.VLLM_TPU}),
    "trace_decode_token_ids": ([5], set(EngineKind)),
    "prompt_embeds": ("UEsDBA==", {EngineKind.VLLM_TPU}),
    "resumable": (True, set(EngineKind)),
    "abort_immediately": (True, set(EngineKind)),
    "kv_hints": ({"a": 1}, set(EngineKind)),
}
NEUTRAL: dict[str, list[object]] = {
    "presence_penalty": [0, 0.0, -0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "watermarking": [False],
    "min_p": [0, 0.0],
    "seed": [-1],
    "stop_token_ids": [[]],
    "ignore_eos": [False],
    "min_tokens": [0],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
    "bad_words": [[]],
    "allowed_token_ids": [[]],
    "logprob_token_ids": [[]],
    "structured_outputs": [{}],
    "response_format": [{"type": "text"}],
    "thinking_token_budget": [-1],
    "thinking": [{"type": "disabled"}, {"type": "adaptive"}],
    "routed_experts_prompt_start": [0],
}


def test_every_field_is_asked_for_here() -> None:
    assert ASKED.keys() == set(BODY_FIELDS)


@pytest.mark.parametrize("facts", [CPU, TPU, PACED], ids=lambda facts: facts.kind)
@pytest.mark.parametrize("field", ASKED)
async def test_value_that_engines_do_not_honour_is_refused_on_every_route_and_a_neutral_one_passes(
    facts: EngineFacts, field: str
) -> None:
    frontend = EchoFrontend("m")
    frontend.body_judge = BodyJudge(facts)
    value, refusing = ASKED[field]
    async with client_of(edge_over(frontend)) as client:
        for path in sorted(MODEL_ROUTES - ENGINELESS_ROUTES):
            answer = await client.post(path, json={"model": "m", field: value})
            if facts.kind not in refusing and field not in UNREAD.get(path, ()):
                assert answer.status_code == 200, answer.text
                continue
            assert answer.status_code == 400, path
            assert f"{field}: it is a" in answer.text
            assert "Allowed: " in answer.text
            if path not in ANTHROPIC_ROUTES:
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        if facts.kind in refusing:
            assert frontend.num_admitted == 0
        for neutral in (None, *NEUTRAL.get(field, [])):
            for path in GENERATE_ROUTES:
                answer = await client.post(path, json={"model": "m", field: neutral})
                assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, names in UNREAD.items() for field in sorted(names)]
)
def test_field_that_a_route_does_not_read_is_refused_there_and_not_dropped(
    path: str, field: str
) -> None:
    body = json.dumps({field: ASKED[field][0]}).encode()
    for facts in (CPU, TPU, PACED):
        with pytest.raises(MalformedRequestError, match=f"{field}: it is a") as caught:
            check(body, facts, path)
        if facts.kind not in ASKED[field][1]:
            assert f"{path} does not read it" in caught.value.message


@pytest.mark.parametrize("path", sorted(ENGINELESS_ROUTES))
async def test_route_without_an_engine_refuses_nothing_that_engines_lack(path: str) -> None:
    frontend = EchoFrontend("m")
    frontend.body_judge = BodyJudge(TPU)
    async with client_of(edge_over(frontend)) as client:
        body = {"model": "m", "thinking": {"type": "enabled", "budget_tokens": 1024}}
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("trait", [Trait.DATA_PARALLEL, Trait.SPECULATES])
@pytest.mark.parametrize("field", ["structured_outputs", "response_format"])
def test_grammar_is_refused_where_engines_on_tpu_keep_none(field: str, trait: Trait) -> None:
    body = json.dumps({field: ASKED[field][0]}).encode()
    facts = EngineFacts(EngineKind.VLLM_TPU, frozenset({trait}))
    with pytest.raises(MalformedRequestError, match="or speculate, keep no grammar") as caught:
        check(body, facts)
    assert caught.value.param == field
    check(body, TPU)
    for neutral in NEUTRAL[field]:
        check(json.dumps({field: neutral}).encode(), facts)


@pytest.mark.parametrize("trait", [Trait.SPECULATES, Trait.TAKES_MEDIA])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"prompt": "a", "prompt_logprobs": 0}', "prompt_logprobs"),
        ("/v1/completions", b'{"prompt": "a", "echo": true, "logprobs": 0}', "echo"),
        ("/v1/chat/completions", b'{"messages": [], "echo": true}', "echo"),
    ],
)
def test_prompt_logprobs_are_refused_where_they_end_the_engine(
    trait: Trait, path: str, body: bytes, param: str
) -> None:
    facts = EngineFacts(EngineKind.VLLM_TPU, frozenset({trait}))
    with pytest.raises(MalformedRequestError, match="no log-probabilities of prompts") as caught:
        check(body, facts, path)
    assert caught.value.param == param
    check(body, TPU, path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "a", "echo": true}'),
        ("/v1/chat/completions", b'{"messages": [], "echo": false, "logprobs": true}'),
    ],
)
def test_what_makes_no_prompt_logprobs_passes(path: str, body: bytes) -> None:
    check(body, EngineFacts(EngineKind.VLLM_TPU, frozenset({Trait.SPECULATES})), path)


@pytest.mark.parametrize("field", ["min_p", "logit_bias", "logprob_token_ids"])
def test_field_that_speculation_takes_away_is_refused_on_cpu_too(field: str) -> None:
    body = json.dumps({field: ASKED[field][0]}).encode()
    with pytest.raises(MalformedRequestError, match="speculate"):
        check(body, EngineFacts(EngineKind.VLLM, frozenset({Trait.SPECULATES})))


@pytest.mark.parametrize("value", ["1" * 5000, '"\\ud800"', '{"a":' * 900 + "1" + "}" * 900])
def test_value_that_cannot_be_read_is_refused_and_no_fault_of_ours(value: str) -> None:
    with pytest.raises(MalformedRequestError):
        check(b'{"seed": %s}' % value.encode(), TPU)


async def test_last_of_two_values_counts() -> None:
    for first, last, status in ((0, 0.5, 400), (0.5, 0, 200)):
        frontend = EchoFrontend("m")
        frontend.body_judge = BodyJudge(TPU)
        async with client_of(edge_over(frontend)) as client:
            body = f'{{"model": "m", "min_p": {first}, "min_p": {last}}}'
            answer = await client.post("/v1/completions", content=body)
            assert answer.status_code == status, body


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
        for fit in (None, {} if path in ANTHROPIC_ROUTES else {"json": "{}"}):
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
