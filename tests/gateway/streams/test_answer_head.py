"""A stream's head goes with its first output, or after a while; then comments keep it open."""

import asyncio

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config.application import GatewayConfig
from serving.domain.errors import OverloadedError
from serving.gateway.dispatch.admission import RequestTarget
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams import answer_head
from serving.gateway.streams.answer_head import AnswerHead
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT
from tests.gateway.engines import ScriptedLink
from tests.gateway.test_failed_after_admission import OneVersion, Streamed
from tests.gateway.test_forged_resume import CONFIG, MODEL, ROUTES
from tests.gateway.test_http_edge import EchoFrontend, edge_over

from .over_http import HttpStream, http_server

DEADLINE_S = 30.0
SHORT_S = 0.01
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}
COMMENT = b": waiting\n\n"


def part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


class Client:
    """What a client gets; it may stop reading."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.num_heads = self.status = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.asked = asyncio.Event()
        self.came = asyncio.Condition()

    async def send(self, message: Message) -> None:
        self.asked.set()
        await self.may_read.wait()
        if message["type"] == "http.response.start":
            self.num_heads += 1
            self.status = message["status"]
            assert not self.got
        else:
            self.got.append(message["body"])
        async with self.came:
            self.came.notify_all()

    async def has(self, num_parts: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.came:
            await self.came.wait_for(lambda: len(self.got) >= num_parts)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_head, "HEAD_AFTER_S", SHORT_S)
    monkeypatch.setattr(answer_head, "COMMENT_EVERY_S", SHORT_S)


async def test_nothing_is_sent_before_it_is_released() -> None:
    client = Client()
    head = AnswerHead(client.send)
    head.hold(HEAD)
    head.keep(part(b"created"))
    await asyncio.sleep(0)
    assert (client.num_heads, client.got, head.is_held) == (0, [], True)
    await head.release()
    await head.release()
    assert (client.num_heads, client.got, head.has_part) == (1, [b"created"], False)


async def test_head_that_is_dropped_is_never_sent() -> None:
    client = Client()
    head = AnswerHead(client.send)
    head.hold(HEAD)
    head.drop()
    await head.release()
    assert (client.num_heads, head.has_part) == (0, False)


@pytest.mark.usefixtures("_soon")
async def test_head_that_takes_the_place_of_one_that_waits_goes_when_that_would_have_gone() -> None:
    client = Client()
    head = AnswerHead(client.send)
    head.hold({**HEAD, "status": 500})
    head.hold(HEAD)
    await client.has(1)
    assert (client.num_heads, client.status, head.was_sent) == (1, 200, True)
    head.close()


@pytest.mark.usefixtures("_soon")
async def test_head_goes_after_a_while_and_comments_follow_until_something_comes() -> None:
    client = Client()
    head = AnswerHead(client.send)
    head.hold(HEAD)
    head.keep(part(b"created"))
    await client.has(3)
    assert client.num_heads == 1
    assert client.got[:3] == [b"created", COMMENT, COMMENT]
    await head.release()
    num_got = len(client.got)
    await asyncio.sleep(5 * SHORT_S)
    assert len(client.got) == num_got


@pytest.mark.usefixtures("_soon")
async def test_a_part_waits_for_the_comment_before_it() -> None:
    """Two that send at once would be parts of events within each other."""
    client = Client()
    client.may_read.clear()
    head = AnswerHead(client.send)
    head.hold(HEAD)
    await client.asked.wait()
    released = asyncio.create_task(head.release())
    await asyncio.sleep(5 * SHORT_S)
    assert not released.done()
    client.may_read.set()
    await released
    # One comment, however long the client did not read.
    assert (client.num_heads, client.got) == (1, [COMMENT])


@pytest.mark.usefixtures("_soon")
async def test_a_stream_that_stands_still_has_comments() -> None:
    client = Client()
    head = AnswerHead(client.send)
    head.stands_still()
    await client.has(2)
    head.goes_on()
    assert not client.num_heads
    await head.release()
    num_got = len(client.got)
    await asyncio.sleep(5 * SHORT_S)
    assert len(client.got) == num_got


async def test_what_was_closed_sends_nothing() -> None:
    client = Client()
    head = AnswerHead(client.send)
    head.hold(HEAD)
    head.close()
    await asyncio.sleep(0)
    assert not client.num_heads


# -- at the edge --


@pytest.mark.imports_vllm
@pytest.mark.parametrize("path", ROUTES)
async def test_stream_without_an_output_that_fails_has_the_errors_status(path: str) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    link = ScriptedLink(version.dispatcher)
    async with asyncio.timeout(DEADLINE_S):
        body = {"model": MODEL, "stream": True, **ROUTES[path]}
        answer = Streamed(edge_over(OneVersion(version)), path, body)
        while not link.submitted:
            assert not answer.task.done()
            await asyncio.sleep(SHORT_S)
        (request_id,) = version.dispatcher._requests
        request = version.dispatcher._requests[request_id]
        version.dispatcher._fail(request, OverloadedError(MODEL, 7, 12.0))
        await answer.task
    assert answer.status == 429
    assert answer.is_whole
    assert "7 requests already wait" in answer.error["message"]
    version.llm.shutdown()


class Waiting(EchoFrontend):
    """A model whose stream has its first output when it is told."""

    def __init__(self) -> None:
        super().__init__("m")
        self.has_output = asyncio.Event()

    async def enter(self, target: RequestTarget) -> ASGIApp:
        return self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.has_output.wait()
        context = REQUEST_CONTEXT.get()
        assert context is not None
        context.has_begun = True
        await send(part(b'data: {"choices": [{"text": "a"}]}\n\n'))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@pytest.mark.usefixtures("_soon")
async def test_over_http_a_stream_that_waits_is_begun_and_kept_open() -> None:
    model = Waiting()
    async with asyncio.timeout(DEADLINE_S), http_server(edge_over(model)) as port:
        stream = HttpStream(port, "/v1/completions", {"model": "m"})
        while len(stream.parts) < 3:
            stream.came.clear()
            await stream.came.wait()
        model.has_output.set()
        await stream.task
    assert stream.status == 200
    assert set(stream.parts[:-2]) == {COMMENT}
    # A reader of events sees none of it.
    assert stream.text == "a"


async def test_over_http_a_stream_has_no_head_before_its_first_output() -> None:
    model = Waiting()
    async with asyncio.timeout(DEADLINE_S), http_server(edge_over(model)) as port:
        stream = HttpStream(port, "/v1/completions", {"model": "m"})
        await asyncio.sleep(10 * SHORT_S)
        assert not stream.status
        model.has_output.set()
        await stream.task
    assert (stream.status, len(stream.parts)) == (200, 2)


class Answering(EchoFrontend):
    """A model that takes a request once it is told to, and answers it as it is told."""

    def __init__(self, answer: ASGIApp) -> None:
        super().__init__("m")
        self.may_enter = asyncio.Event()
        self._app = answer

    async def enter(self, target: RequestTarget) -> ASGIApp:
        await self.may_enter.wait()
        return self._app


async def begun_stream(model: Answering, port: int) -> HttpStream:
    """A stream that has waited until it was begun; the model takes it now."""
    stream = HttpStream(port, "/v1/completions", {"model": "m", "stream": True})
    await comments(stream, 1)
    model.may_enter.set()
    return stream


async def comments(stream: HttpStream, count: int) -> None:
    while stream.parts.count(COMMENT) < count:
        stream.came.clear()
        await stream.came.wait()


@pytest.mark.usefixtures("_soon")
async def test_over_http_comments_go_on_behind_what_comes_before_the_first_output() -> None:
    has_output = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(part(b"data: {}\n\n"))
        await has_output.wait()
        context = REQUEST_CONTEXT.get()
        assert context is not None
        context.has_begun = True
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    model = Answering(answer)
    async with asyncio.timeout(DEADLINE_S), http_server(edge_over(model)) as port:
        stream = await begun_stream(model, port)
        while b"data: {}\n\n" not in stream.parts:
            stream.came.clear()
            await stream.came.wait()
        await comments(stream, stream.parts.count(COMMENT) + 2)
        has_output.set()
        await stream.task
    assert [each for each in stream.parts if each != COMMENT] == [
        b"data: {}\n\n",
        b"data: [DONE]\n\n",
    ]


async def _fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError("the prompt")


async def _answers_whole(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send(part(b'{"choices": '))
    await send({"type": "http.response.body", "body": b"[]}"})


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("answer", [_fails, _answers_whole])
async def test_over_http_a_begun_stream_whose_answer_is_none_is_told_that_the_gateway_failed(
    answer: ASGIApp,
) -> None:
    model = Answering(answer)
    async with asyncio.timeout(DEADLINE_S), http_server(edge_over(model)) as port:
        stream = await begun_stream(model, port)
        await stream.task
    assert stream.status == 200
    (told,) = stream.events
    assert told["error"]["code"] == "internal_error"
    assert b"prompt" not in b"".join(stream.parts)


@pytest.mark.usefixtures("_soon")
async def test_over_http_a_body_that_only_looks_like_a_streams_waits_without_a_head() -> None:
    """`stream` of another route, and what vLLM takes for `true`."""
    model = Answering(_answers_whole)
    async with asyncio.timeout(DEADLINE_S), http_server(edge_over(model)) as port:
        asked = [
            asyncio.create_task(post(port, path, {"model": "m", "stream": stream}))
            for path, stream in (("/v1/embeddings", True), ("/v1/completions", "true"))
        ]
        await asyncio.sleep(10 * SHORT_S)
        assert not any(each.done() for each in asked)
        model.may_enter.set()
        assert [await each for each in asked] == [(200, b'{"choices": []}')] * 2


async def post(port: int, path: str, body: dict[str, object]) -> tuple[int, bytes]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.post(path, json=body)
    return answer.status_code, answer.content
