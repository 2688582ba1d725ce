"""A request that fails once vLLM's frontend has it is answered with our error, on every route.

vLLM's frontend is the real one, behind the real edge; the engine is scripted.
"""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config.application import GatewayConfig
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.edge.http import HttpEdge
from serving.gateway.model_version import ModelVersion
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT
from serving.link.messages import Finish, Step, TokenOutput, TokenRequest

from .engines import ScriptedLink
from .test_forged_resume import CONFIG, DEADLINE_S, MODEL, ROUTES
from .test_http_edge import EchoFrontend, client_of, edge_over, post_scope

pytestmark = pytest.mark.imports_vllm


class OneVersion(EchoFrontend):
    """A model whose application is vLLM's."""

    def __init__(self, version: ModelVersion) -> None:
        super().__init__(MODEL)
        self._version = version

    async def enter(self, target: RequestTarget) -> ASGIApp:
        app = await self._version.app()
        return self._version.preparing(app) if target.is_prepared_apart else app


@pytest.mark.parametrize("path", ROUTES)
async def test_failure_has_its_code_and_when_to_come_back(path: str) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    async with asyncio.timeout(DEADLINE_S), client_of(edge) as client:
        asked = asyncio.create_task(client.post(path, json={"model": MODEL, **ROUTES[path]}))
        while not link.submitted:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.01)
        (wire_id,) = link.running
        refusal = TokenOutput(wire_id, [], int(Finish.ERROR), stop_reason="no room")
        version.dispatcher.take_step(link.engine_id, Step([refusal]))
        answer = await asked
        metrics = edge.metrics
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["message"] == "The engine refused the request: no room"
    if path == "/v1/messages":
        assert error["type"] == "overloaded_error"
    else:
        assert (error["type"], error["code"]) == ("server_error", "engine_refused")
    # It was admitted, it was answered once, and nobody cancelled it.
    assert [result for _, result, _ in metrics.admissions] == ["admitted"]
    assert list(metrics.responses.values()) == [1]
    assert not metrics.cancellations
    version.llm.shutdown()


class UnforeseenLink(ScriptedLink):
    """A link on which something fails that nobody has thought of."""

    def submit(self, request: TokenRequest) -> None:
        raise KeyError(f"unforeseen: {request.prompt_token_ids}")


# vLLM logs those of /v1/messages itself.
@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/v1/messages"])
async def test_fault_that_nobody_foresaw_is_logged_with_its_place_and_without_its_words(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    UnforeseenLink(version.dispatcher)
    async with asyncio.timeout(DEADLINE_S), client_of(edge_over(OneVersion(version))) as client:
        answer = await client.post(path, json={"model": MODEL, **ROUTES[path]})
    assert answer.status_code == 500
    (told,) = [line for line in caplog.messages if line.startswith("frontend_fault")]
    assert f"path={path} " in told
    assert "EngineGenerateError at async_llm.py:" in told
    assert "from KeyError at test_failed_after_admission.py:" in told
    assert "unforeseen" not in caplog.text
    version.llm.shutdown()


class Streamed:
    """A streamed answer, as it comes out of the edge. The client stays until its end."""

    def __init__(self, edge: HttpEdge, path: str, body: dict[str, Any]) -> None:
        self.chunks: list[bytes] = []
        self.status = 0
        self.is_whole = False
        pending = [{"type": "http.request", "body": json.dumps(body).encode()}]
        stays = asyncio.Event()

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await stays.wait()
            raise AssertionError("the client stays")

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                assert not self.status
                self.status = message["status"]
            else:
                self.chunks.append(message.get("body", b""))
                self.is_whole = not message.get("more_body", False)

        scope = post_scope(path, content_type="application/json") | {
            "query_string": b"",
            "root_path": "",
            "http_version": "1.1",
        }
        self.task = asyncio.ensure_future(edge(scope, receive, send))

    @property
    def error(self) -> dict[str, Any]:
        """The error that it is, where it is no stream."""
        told: dict[str, Any] = json.loads(b"".join(self.chunks))["error"]
        return told

    @property
    def events(self) -> list[dict[str, Any]]:
        """What its events carry, `[DONE]` left out."""
        lines = b"".join(self.chunks).decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]


@pytest.mark.parametrize("path", ROUTES)
async def test_stream_that_fails_ends_with_the_error_in_its_clients_form(path: str) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    async with asyncio.timeout(DEADLINE_S):
        body = {"model": MODEL, "stream": True, **ROUTES[path]}
        answer = Streamed(edge, path, body)
        while not link.submitted:
            assert not answer.task.done()
            await asyncio.sleep(0.01)
        link.step(1)
        (wire_id,) = link.running
        refusal = TokenOutput(wire_id, [], int(Finish.ERROR), stop_reason="no room")
        version.dispatcher.take_step(link.engine_id, Step([refusal]))
        await answer.task
    assert answer.is_whole
    told = [event for event in answer.events if "error" in (event.get("type"), *event)]
    assert told == [answer.events[-1]]
    assert len(answer.events) > 1, "the token that came before is missing"
    error, words = told[0], "The engine refused the request: no room"
    if path == "/v1/messages":
        said = {"type": "overloaded_error", "message": words}
        assert error == {"type": "error", "error": said}
    elif path == "/v1/responses":
        number = error.pop("sequence_number")
        assert number == answer.events[-2]["sequence_number"] + 1
        assert error == {"type": "error", "code": "engine_refused", "message": words, "param": None}
    else:
        assert error["error"] == {
            "message": words,
            "type": "server_error",
            "param": None,
            "code": "engine_refused",
        }
    assert list(edge.metrics.responses.values()) == [1]
    version.llm.shutdown()


async def test_request_that_is_refused_after_its_stream_was_begun_has_the_refusals_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`/v1/responses` begins its stream before it has looked at all of the request."""
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    path = "/v1/responses"
    body = {"model": MODEL, "stream": True, "structured_outputs": {"json": ""}, **ROUTES[path]}
    async with asyncio.timeout(DEADLINE_S):
        answer = Streamed(edge_over(OneVersion(version)), path, body)
        await answer.task
    assert answer.is_whole
    assert not link.submitted
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert "cannot be an empty string" in answer.error["message"]
    assert "frontend_fault" not in caplog.text
    version.llm.shutdown()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_fault_within_a_stream_is_told_without_its_words(*, has_begun: bool) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        context = REQUEST_CONTEXT.get()
        assert context is not None
        context.has_begun = has_begun
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        raise KeyError("the prompt")

    class Failing(EchoFrontend):
        async def enter(self, target: RequestTarget) -> ASGIApp:
            return fails

    async with asyncio.timeout(DEADLINE_S):
        answer = Streamed(edge_over(Failing("m")), "/v1/completions", {"model": "m"})
        await answer.task
    assert answer.is_whole
    error = answer.events[-1]["error"] if has_begun else answer.error
    assert error["code"] == "internal_error"
    assert answer.status == (200 if has_begun else 500)
    assert b"prompt" not in b"".join(answer.chunks)


@pytest.mark.parametrize("path", ROUTES)
async def test_stream_of_a_value_that_cannot_be_sent_says_that_its_client_is_to_change_it(
    path: str,
) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    ScriptedLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    async with asyncio.timeout(DEADLINE_S):
        # The record takes any integer, and the link those of 64 bits.
        answer = Streamed(
            edge, path, {"model": MODEL, "stream": True, "top_k": 10**30, **ROUTES[path]}
        )
        await answer.task
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    words = answer.error["message"]
    assert "cannot be sent to an engine" in words
    assert "integers of 64 bits" in words
    assert "pydantic" not in words
    version.llm.shutdown()
