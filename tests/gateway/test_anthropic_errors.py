"""Errors on Anthropic's routes are in Anthropic's form, whichever form they had before."""

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from serving.gateway.edge.anthropic_errors import AnthropicRefusals

OPENAI = {"error": {"message": "no", "type": "Bad Request", "param": "body.n", "code": 400}}
ANTHROPIC = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


async def asked(path: str, answer: Response) -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, receive, send)

    transport = httpx.ASGITransport(AnthropicRefusals(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(path)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "told", [OPENAI, {"type": "error", "error": {"type": "BadRequestError", "message": "no"}}]
)
async def test_error_of_either_form_is_written_in_anthropics(
    path: str, told: dict[str, object]
) -> None:
    answer = await asked(path, JSONResponse(told, 400))
    assert (answer.status_code, answer.json()) == (400, ANTHROPIC)


@pytest.mark.parametrize("words", ["boom", "[]", '{"error": null}', '{"error": {"message": 5}}'])
async def test_error_without_words_says_what_its_status_is_called(words: str) -> None:
    answer = await asked("/v1/messages", PlainTextResponse(words, 500))
    assert answer.headers["content-type"] == "application/json"
    error = {"type": "api_error", "message": "Internal Server Error"}
    assert answer.json() == {"type": "error", "error": error}


async def test_answer_that_is_no_error_is_as_it_was() -> None:
    assert (await asked("/v1/messages", JSONResponse({"id": "a"}))).json() == {"id": "a"}
