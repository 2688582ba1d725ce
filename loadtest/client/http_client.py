"""Sends one request over HTTP, reads its answer event by event, and gives failures their kind.

Owns the connection pool, the clock readings and the translation of what the network raises. Does
not own what is sent (`body`) nor when (`dispatch`). Runs in greenlets; nothing of it is patched.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketPoolResponse

from loadtest.client.limits import Limits
from loadtest.client.stream import Answer
from loadtest.errors import ErrorKind, LoadTestError, RequestFailedError

# Never a limit: a client that waits for a connection of its own would hide the server's queue.
_MAX_CONNECTIONS = 100_000
_FIRST_BACKOFF_S = 0.5
_EXCERPT = 200  # bytes of an error's body that its record shows
_RETRIED = frozenset({ErrorKind.REFUSED_429, ErrorKind.UNAVAILABLE_503})
_KINDS = {429: ErrorKind.REFUSED_429, 503: ErrorKind.UNAVAILABLE_503}


@dataclass(slots=True)
class Exchange:
    """The exchange of one request and its answer. Instants are monotonic seconds of this machine.

    `sent_s` is when the first attempt was sent, `ended_s` when the client was done with the last.
    `error` is `None` for a whole answer.
    """

    sent_s: float
    answer: Answer
    ended_s: float = 0.0
    error: ErrorKind | None = None
    detail: str | None = None
    http_status: int | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """The request made ready: path below the server's URL, body, headers of its own.

    `prompt_token_ids` are the prompt's where it was given as such, `None` for a text.
    """

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    keeps_content: bool = False
    prompt_token_ids: Sequence[int] | None = None


class Client:
    """Sends requests to one server, any number at a time.

    Raises:
        LoadTestError: the URL is none of HTTP.
    """

    def __init__(
        self, url: str, limits: Limits, chance: random.Random, api_key: str | None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            msg = f"url={url!r} is not allowed: http://HOST[:PORT] or https://HOST[:PORT]"
            raise LoadTestError(msg)
        self._limits = limits
        self._chance = chance
        self._base = parts.path.rstrip("/")
        # identity: an event that waits for the end of a compressed block has no arrival of its own.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = HTTPClient.from_url(
            f"{parts.scheme}://{parts.netloc}/",
            concurrency=_MAX_CONNECTIONS,
            connection_timeout=limits.connect_s,
            network_timeout=limits.silence_s,
            headers=headers,
        )
        self._open: set[Answer] = set()
        self._num_ended_events = 0

    @property
    def num_in_flight(self) -> int:
        """The number of requests with answers that are not over."""
        return len(self._open)

    @property
    def num_token_events(self) -> int:
        """The token events read so far, including those of answers that are not over."""
        return self._num_ended_events + sum(answer.num_chunks for answer in self._open)

    def close(self) -> None:
        """Closes the idle connections."""
        self._http.close()

    def send(self, request: OutgoingRequest) -> Exchange:
        """Sends it and reads the answer to its end. Failures are in the exchange, never raised.

        A greenlet that is killed while it waits returns with what came so far, as `UNFINISHED`.
        """
        exchange = Exchange(time.monotonic(), Answer(keeps_content=request.keeps_content))
        self._open.add(exchange.answer)
        deadline = gevent.Timeout.start_new(self._limits.request_s)
        try:
            self._attempt_all(request, exchange)
        except RequestFailedError as failure:
            exchange.error, exchange.detail = failure.kind, failure.detail
        except (OSError, HTTPParseError) as error:
            exchange.error = _kind_of(error, exchange)
            exchange.detail = f"{type(error).__name__}: {error}"
        except gevent.Timeout as caught:
            if caught is not deadline:
                raise
            exchange.error = ErrorKind.TIMEOUT
            exchange.detail = f"not over after {self._limits.request_s:g} s"
        except gevent.GreenletExit:
            exchange.error, exchange.detail = ErrorKind.UNFINISHED, "the run was over"
        finally:
            deadline.close()
            exchange.ended_s = time.monotonic()
            self._open.discard(exchange.answer)
            self._num_ended_events += exchange.answer.num_chunks
        return exchange

    def _attempt_all(self, request: OutgoingRequest, exchange: Exchange) -> None:
        while True:
            exchange.attempts += 1
            retries_left = self._limits.max_retries - exchange.attempts + 1
            try:
                self._attempt(request, exchange)
            except _RefusedError as refusal:
                wait_s = self._wait_s(refusal.retry_after, exchange.attempts)
                if refusal.kind not in _RETRIED or retries_left <= 0 or wait_s is None:
                    raise
            else:
                return
            gevent.sleep(wait_s)

    def _wait_s(self, retry_after: str | None, attempt: int) -> float | None:
        """Returns the delay before the next attempt, `None` if the server's delay is too long."""
        if retry_after is not None and retry_after.isdigit():
            wait_s = float(retry_after)
            return wait_s if wait_s <= self._limits.max_retry_after_s else None
        # Full jitter: clients refused together must not come back together.
        return self._chance.uniform(0, _FIRST_BACKOFF_S * 2**attempt)

    def _attempt(self, request: OutgoingRequest, exchange: Exchange) -> None:
        exchange.http_status = None
        with self._http.request(
            "POST", self._base + request.path, request.body, request.headers
        ) as response:
            exchange.http_status = response.status_code
            if response.status_code != 200:
                raise _refusal(response)
            _read_answer(response, exchange.answer)


class _RefusedError(RequestFailedError):
    """Reports an answer with a status other than 200. `retry_after` is the header as it came."""

    def __init__(self, kind: ErrorKind, detail: str, retry_after: str | None) -> None:
        super().__init__(kind, detail)
        self.retry_after = retry_after


def _refusal(response: HTTPSocketPoolResponse) -> _RefusedError:
    status = response.status_code
    body = response.read()[:_EXCERPT].decode("utf-8", "replace")
    if status in _KINDS:
        kind = _KINDS[status]
    elif status >= 500:
        kind = ErrorKind.HTTP_5XX
    else:
        kind = ErrorKind.HTTP_4XX if status >= 400 else ErrorKind.MALFORMED
    return _RefusedError(kind, f"HTTP {status}: {body}", _header(response, "retry-after"))


def _read_answer(response: HTTPSocketPoolResponse, answer: Answer) -> None:
    content_type = _header(response, "content-type") or ""
    if content_type.startswith("application/json"):
        answer.take_whole(response.read(), time.monotonic())
    elif content_type.startswith("text/event-stream"):
        _read_stream(response, answer)
    else:
        msg = f"content-type {content_type!r} is neither an event stream nor JSON"
        raise RequestFailedError(ErrorKind.MALFORMED, msg)
    answer.finish(time.monotonic())


def _read_stream(response: HTTPSocketPoolResponse, answer: Answer) -> None:
    """Reads line by line: waiting for a blank line would lose all of a server that ends in CRLF."""
    read_line, now = response.readline, time.monotonic
    try:
        while line := read_line(b"\n"):
            answer.take_line(line, now())
        # The body is over; what is left is a last line without its end.
        if rest := response.read():
            answer.take_line(rest, now())
    except (OSError, HTTPParseError):
        if not answer.is_done:  # after [DONE] nothing is missing
            raise


def _header(response: HTTPSocketPoolResponse, name: str) -> str | None:
    value: list[str] | str | None = response.get(name)
    return value[0] if isinstance(value, list) else value


def _kind_of(error: OSError | HTTPParseError, exchange: Exchange) -> ErrorKind:
    """Returns the kind of a network failure: no response, a part of one, or silence."""
    if isinstance(error, TimeoutError):
        return ErrorKind.TIMEOUT
    return ErrorKind.CONNECT if exchange.http_status is None else ErrorKind.TRUNCATED
