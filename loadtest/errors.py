"""The kinds of failure a request can have, what a load test refuses, and how a run ends."""

from enum import IntEnum, StrEnum


class ErrorKind(StrEnum):
    """The way in which a request failed."""

    CONNECT = "connect"  # no connection
    TIMEOUT = "timeout"  # silence, or the whole request took too long
    HTTP_4XX = "http_4xx"  # refused; 429 has a kind of its own
    REFUSED_429 = "refused_429"  # refused for load
    HTTP_5XX = "http_5xx"
    UNAVAILABLE_503 = "unavailable_503"  # nothing to serve it with
    STREAM_ERROR = "stream_error"  # an error event inside a stream that began well
    TRUNCATED = "truncated"  # the stream ended without a finish reason and [DONE]
    MALFORMED = "malformed"  # not as the protocol requires
    NO_TOKENS = "no_tokens"  # a whole answer without a token
    UNFINISHED = "unfinished"  # still running when the run was over


class ExitCode(IntEnum):
    """The exit codes of `slicewise loadtest`. Judged in this order: 4, 1, 3."""

    OK = 0  # valid, nothing failed, all objectives met
    FAILED = 1  # requests failed, tokens were lost or wrong, or nothing succeeded
    USAGE = 2  # the command or a file is wrong
    OBJECTIVE_MISSED = 3  # valid, and an objective was missed or had no samples
    CLIENT_INVALID = 4  # the numbers describe the client, not the server


class LoadTestError(ValueError):
    """Reports a test that cannot be run. The message names field, value and what is allowed."""


class RequestFailedError(Exception):
    """Reports a failed request. It is recorded; the run goes on."""

    def __init__(self, kind: ErrorKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
