import random
import socket
from collections.abc import Iterator

import gevent
import msgspec
import pytest
from golden_server import Golden, golden_server

from loadtest.client.http_client import Client, Exchange, OutgoingRequest
from loadtest.client.limits import Limits
from loadtest.errors import ErrorKind, LoadTestError

pytestmark = pytest.mark.process

NUM_TOKENS = 6
PATIENCE = Limits(connect_s=5, silence_s=5, request_s=10)


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    with golden_server() as server:
        yield server


def ask(
    golden: Golden,
    behaviour: str,
    *,
    request_id: str,
    limits: Limits = PATIENCE,
    path: str = "/v1/chat/completions",
) -> Exchange:
    client = Client(golden.url, limits, random.Random(1), api_key=None)
    prompt: dict[str, object] = (
        {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hi"}
    )
    body = msgspec.json.encode({"model": behaviour, "max_tokens": NUM_TOKENS} | prompt)
    try:
        headers = {"x-request-id": request_id}
        return client.send(OutgoingRequest(path, body, headers, keeps_content=True))
    finally:
        client.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "behaviour",
    ["", "ends=crlf", "tear=1", "tear=1,ends=crlf", "ping=1", "usage=beside", "fault=noblank"],
)
def test_whole_answer_is_read_however_it_is_written(
    golden: Golden, path: str, behaviour: str
) -> None:
    exchange = ask(golden, f"ttft=5,dt=2,{behaviour}", request_id="w", path=path)
    answer = exchange.answer
    assert exchange.error is None, exchange.detail
    assert answer.text == "é" * NUM_TOKENS
    assert answer.num_chunks == NUM_TOKENS
    assert sum(answer.gap_counts.values()) == NUM_TOKENS - 1
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.cached_tokens) == (NUM_TOKENS, 1)


@pytest.mark.parametrize("kind", ["reasoning", "tools"])
def test_reasoning_and_tool_calls_are_tokens(golden: Golden, kind: str) -> None:
    exchange = ask(golden, f"ttft=5,dt=2,kind={kind}", request_id=kind)
    assert (exchange.error, exchange.answer.num_chunks) == (None, NUM_TOKENS)


def test_several_tokens_in_one_event_are_one_chunk(golden: Golden) -> None:
    exchange = ask(golden, "ttft=5,dt=2,clump=4", request_id="clump")
    assert exchange.answer.num_chunks == 2
    assert exchange.answer.usage is not None
    assert exchange.answer.usage.completion_tokens == NUM_TOKENS


def test_role_is_no_token(golden: Golden) -> None:
    """The role comes at once, so a client that took it for a token would be 60 ms early."""
    exchange = ask(golden, "ttft=60,dt=2", request_id="role")
    first_ns = golden.truth()["requests"]["role"]["written_ns"][0]
    assert exchange.answer.first_s is not None
    assert exchange.answer.first_s >= first_ns / 1e9


def test_usage_may_be_missing(golden: Golden) -> None:
    exchange = ask(golden, "ttft=5,dt=2,usage=none", request_id="nousage")
    assert (exchange.error, exchange.answer.usage) == (None, None)


def test_answer_that_is_no_stream_is_one_event(golden: Golden) -> None:
    exchange = ask(golden, "fault=json", request_id="json")
    assert (exchange.error, exchange.answer.text, exchange.answer.num_chunks) == (None, "all", 1)


@pytest.mark.parametrize(
    ("behaviour", "kind", "detail"),
    [
        ("fault=error", ErrorKind.STREAM_ERROR, "engine died"),
        ("fault=errorevent", ErrorKind.STREAM_ERROR, "engine died"),
        ("fault=jsonerror", ErrorKind.STREAM_ERROR, "no such thing"),
        ("fault=fin", ErrorKind.TRUNCATED, "HTTPParseError"),
        ("fault=reset", ErrorKind.TRUNCATED, "ConnectionResetError"),
        ("fault=nodone", ErrorKind.TRUNCATED, r"without [DONE]"),
        ("fault=nofinish", ErrorKind.TRUNCATED, "without finish_reason after 6"),
        ("fault=hangup", ErrorKind.CONNECT, "connection closed"),
        ("fault=garbage", ErrorKind.MALFORMED, "{]"),
        ("fault=html", ErrorKind.MALFORMED, "text/html"),
        ("kind=empty", ErrorKind.NO_TOKENS, "length"),
        ("status=307", ErrorKind.MALFORMED, "HTTP 307"),
        ("status=400", ErrorKind.HTTP_4XX, "HTTP 400: "),
        ("status=429", ErrorKind.REFUSED_429, "refused"),
        ("status=500", ErrorKind.HTTP_5XX, "HTTP 500"),
        ("status=503", ErrorKind.UNAVAILABLE_503, "HTTP 503"),
    ],
)
def test_every_other_end_has_its_kind(
    golden: Golden, behaviour: str, kind: ErrorKind, detail: str
) -> None:
    exchange = ask(golden, f"ttft=5,dt=2,{behaviour}", request_id="fault")
    assert exchange.error == kind
    assert exchange.detail is not None
    assert detail in exchange.detail


def test_silence_times_out_with_what_came_before(golden: Golden) -> None:
    limits = Limits(silence_s=0.3, request_s=30)
    exchange = ask(golden, "ttft=5,dt=2,fault=silence", request_id="silent", limits=limits)
    assert (exchange.error, exchange.http_status) == (ErrorKind.TIMEOUT, 200)
    assert exchange.answer.num_chunks == NUM_TOKENS // 2


def test_request_that_goes_on_for_too_long_times_out(golden: Golden) -> None:
    limits = Limits(silence_s=30, request_s=0.3)
    exchange = ask(golden, "ttft=5,dt=200", request_id="slow", limits=limits)
    assert exchange.error == ErrorKind.TIMEOUT
    assert exchange.detail == "not over after 0.3 s"


def test_nobody_there_is_a_failure_to_connect() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = Golden(f"http://127.0.0.1:{unused.getsockname()[1]}")
        exchange = ask(nobody, "", request_id="nobody")
    assert (exchange.error, exchange.http_status) == (ErrorKind.CONNECT, None)


@pytest.mark.parametrize("status", [429, 503])
def test_refusal_is_tried_again_after_what_the_server_says(golden: Golden, status: int) -> None:
    limits = Limits(max_retries=2)
    behaviour = f"ttft=5,dt=2,status={status},times=2,retry=0"
    exchange = ask(golden, behaviour, request_id=f"again-{status}", limits=limits)
    assert (exchange.error, exchange.attempts, exchange.http_status) == (None, 3, 200)


def test_first_attempt_is_when_a_request_was_sent(golden: Golden) -> None:
    limits = Limits(max_retries=1)
    behaviour = "ttft=5,dt=2,status=429,times=1,retry=1"
    exchange = ask(golden, behaviour, request_id="sent-once", limits=limits)
    assert exchange.error is None
    assert exchange.answer.first_s is not None
    assert exchange.answer.first_s - exchange.sent_s >= 1


@pytest.mark.parametrize(
    ("limits", "behaviour", "attempts"),
    [
        (Limits(), "status=429,retry=0", 1),  # off unless asked for
        (Limits(max_retries=1), "status=429,retry=0", 2),
        (Limits(max_retries=5, max_retry_after_s=9), "status=429,retry=10", 1),
        (Limits(max_retries=5), "status=500", 1),
        (Limits(max_retries=5), "fault=fin", 1),  # its tokens may have been seen
    ],
)
def test_retries_have_bounds(golden: Golden, limits: Limits, behaviour: str, attempts: int) -> None:
    exchange = ask(golden, f"ttft=5,dt=2,{behaviour}", request_id="bounds", limits=limits)
    assert exchange.error is not None
    assert exchange.attempts == attempts


def test_killed_request_is_unfinished_with_what_came(golden: Golden) -> None:
    sending = gevent.spawn(ask, golden, "ttft=1,dt=3600000", request_id="killed")
    gevent.sleep(0)
    while "killed" not in golden.truth()["requests"]:
        gevent.sleep(0.01)
    while not golden.truth()["requests"]["killed"]["written_ns"]:
        gevent.sleep(0.01)
    gevent.sleep(0.1)
    sending.kill()
    exchange = sending.value
    assert (exchange.error, exchange.http_status) == (ErrorKind.UNFINISHED, 200)
    assert exchange.answer.num_chunks == 1


def test_reported_instants_are_the_servers(golden: Golden) -> None:
    exchange = ask(golden, "ttft=100,dt=20", request_id="instants")
    truth = golden.truth()["requests"]["instants"]
    answer = exchange.answer
    assert answer.first_s is not None
    assert answer.last_s is not None
    written_s = [at_ns / 1e9 for at_ns in truth["written_ns"]]
    assert exchange.sent_s <= truth["received_ns"] / 1e9
    assert written_s[0] <= answer.first_s
    assert written_s[-1] <= answer.last_s <= exchange.ended_s


def test_connections_are_kept(golden: Golden) -> None:
    client = Client(golden.url + "/", PATIENCE, random.Random(1), api_key="secret")
    body = msgspec.json.encode({"model": "ttft=1,dt=1", "max_tokens": 2, "prompt": [1, 2]})
    for name in ("one", "two"):
        request = OutgoingRequest("/v1/completions", body, {"x-request-id": name})
        assert client.send(request).error is None
    client.close()
    one, two = (golden.truth()["requests"][name] for name in ("one", "two"))
    assert one["headers"]["authorization"] == "bearer secret"
    assert one["peer"] == two["peer"]


@pytest.mark.parametrize("url", ["ftp://host", "127.0.0.1:8000", "http://"])
def test_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(LoadTestError, match=r"url=.* is not allowed: http://HOST\[:PORT\]"):
        Client(url, PATIENCE, random.Random(1), api_key=None)
