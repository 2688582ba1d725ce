"""How many answers and inputs one request may ask for, whatever form it asks in."""

import json

import pytest

from .test_http_edge import EchoFrontend, client_of, edge_over
from .test_refused_fields import GENERATE_ROUTES

MOST_ANSWERS, MOST_INPUTS = 8, 5
POOL = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/classify", "/pooling")


async def status_of(path: str, body: str) -> tuple[int, str]:
    edge = edge_over(
        EchoFrontend("m"),
        max_sequences=MOST_ANSWERS,
        max_inputs=MOST_INPUTS,
        max_body_bytes=10_000,
    )
    async with client_of(edge) as client:
        answer = await client.post(path, content=body)
    return answer.status_code, answer.text


@pytest.mark.parametrize("path", GENERATE_ROUTES)
@pytest.mark.parametrize("n", ["9", "9.0", '"9"', "1e300", "9223372036854775808", '" 9 "', "9e0"])
async def test_more_answers_than_allowed_are_refused_in_every_spelling(path: str, n: str) -> None:
    status, text = await status_of(path, f'{{"model": "m", "n": {n}}}')
    assert status == 400
    assert "allowed: at most 8" in text
    assert json.loads(text)["error"].get("param", "n") == "n"


@pytest.mark.parametrize("n", ["8", "1", "0", "-1", "null", '"x"', "[]", "{}", "0.5", "true"])
async def test_what_is_allowed_or_no_number_is_left_to_vllm(n: str) -> None:
    status, _ = await status_of("/v1/completions", f'{{"model": "m", "n": {n}}}')
    assert status == 200


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [
        ('"a"', 1),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9]", 1),
        ("[-1, 2]", 1),
        ("[]", 1),
        (json.dumps(["a"] * 4), 4),
        (json.dumps([[1, 2]] * 4), 4),
        (json.dumps(["a"] * 9), 9),
        (" [ [1],[2],\n[3],[4] ]", 4),
    ],
)
async def test_prompts_multiply_answers(prompt: str, num_prompts: int) -> None:
    for n in (1, 2, 3, 8):
        body = f'{{"model": "m", "prompt": {prompt}, "n": {n}}}'
        status, _ = await status_of("/v1/completions", body)
        assert status == (400 if n * num_prompts > MOST_ANSWERS else 200), body


@pytest.mark.parametrize("path", POOL)
@pytest.mark.parametrize("field", ["input", "documents", "queries", "items", "text_1", "data_2"])
async def test_more_inputs_than_allowed_are_refused(path: str, field: str) -> None:
    for count in (MOST_INPUTS, MOST_INPUTS + 1):
        body = json.dumps({"model": "m", field: ["a"] * count})
        status, text = await status_of(path, body)
        assert status == (200 if count == MOST_INPUTS else 400)
    assert f"{field}: 6 inputs in one request; allowed: at most 5" in text


async def test_tokens_of_one_input_are_not_counted() -> None:
    status, _ = await status_of("/v1/embeddings", json.dumps({"model": "m", "input": [1] * 100}))
    assert status == 200
