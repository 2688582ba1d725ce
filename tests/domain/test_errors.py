"""The error tree: HTTP statuses, wire shapes, headers, pickling."""

import pickle

import pytest

from serving.domain.errors import (
    CannotResumeError,
    ConfigError,
    DeadlineTooShortError,
    ExpiredKeyError,
    ForbiddenError,
    GatewayBehindError,
    MalformedRequestError,
    NoEngineInTimeError,
    NoTokenLeftError,
    OverloadedError,
    PoisonRequestError,
    Problem,
    RequestError,
    RequestTooLargeError,
    SlicewiseError,
    UnauthorizedError,
    UnknownModelError,
    UnknownRouteError,
    WrongMethodError,
    anthropic_error_body,
    error_headers,
    openai_error_body,
)

# Error, status, OpenAI type, OpenAI code, param, Anthropic type.
CASES = [
    (
        MalformedRequestError("`n` must be at least 1", "n"),
        (400, "invalid_request_error", None, "n", "invalid_request_error"),
    ),
    (
        UnauthorizedError(),
        (401, "invalid_request_error", "invalid_api_key", None, "authentication_error"),
    ),
    (
        ExpiredKeyError("ci", "2027-01-01T00:00:00Z"),
        (401, "invalid_request_error", "expired_api_key", None, "authentication_error"),
    ),
    (
        ForbiddenError("ci", "model", "gpt-9", ["demo"]),
        (403, "permission_error", "model_not_allowed", "model", "permission_error"),
    ),
    (
        ForbiddenError("ci", "scope", "fleet", ["metrics"]),
        (403, "permission_error", "scope_not_allowed", None, "permission_error"),
    ),
    (
        UnknownRouteError("/v3"),
        (404, "invalid_request_error", "not_found", None, "not_found_error"),
    ),
    (
        WrongMethodError("GET", "/v1/completions", ["POST"]),
        (405, "invalid_request_error", "method_not_allowed", None, "invalid_request_error"),
    ),
    (
        UnknownModelError("gpt-9", ["demo"]),
        (404, "invalid_request_error", "model_not_found", "model", "not_found_error"),
    ),
    (
        RequestTooLargeError(1024),
        (413, "invalid_request_error", "request_too_large", None, "request_too_large"),
    ),
    (
        OverloadedError("demo", 7, 2.5),
        (429, "rate_limit_error", "overloaded", None, "rate_limit_error"),
    ),
    (
        GatewayBehindError("demo", 3.2),
        (429, "rate_limit_error", "gateway_behind", None, "rate_limit_error"),
    ),
    (
        NoTokenLeftError(["bad_words"], 2),
        (400, "invalid_request_error", "no_token_left", None, "invalid_request_error"),
    ),
    (
        DeadlineTooShortError(2.0, 0.5),
        (
            400,
            "invalid_request_error",
            "deadline_too_short",
            "x-slo-ttft-ms",
            "invalid_request_error",
        ),
    ),
    (PoisonRequestError(3), (500, "server_error", "poison_request", None, "api_error")),
    (CannotResumeError("n > 1"), (500, "server_error", "cannot_resume", None, "api_error")),
    (
        CannotResumeError("no engine left", 1.0),
        (503, "server_error", "cannot_resume", None, "overloaded_error"),
    ),
    (
        NoEngineInTimeError("demo", 60.0, 30.0),
        (503, "server_error", "no_engine_in_time", None, "overloaded_error"),
    ),
]
ERRORS = [error for error, _ in CASES]


def name_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, RequestError) else ""


@pytest.mark.parametrize(("error", "expected"), CASES, ids=name_of)
def test_openai_body_has_all_four_fields(
    error: RequestError, expected: tuple[int, str, str | None, str | None, str]
) -> None:
    status, kind, code, param, _ = expected
    assert error.status == status
    assert openai_error_body(error) == {
        "error": {"message": str(error), "type": kind, "param": param, "code": code}
    }


@pytest.mark.parametrize(("error", "expected"), CASES, ids=name_of)
def test_anthropic_body_names_the_type_of_its_status(
    error: RequestError, expected: tuple[int, str, str | None, str | None, str]
) -> None:
    assert anthropic_error_body(error) == {
        "type": "error",
        "error": {"type": expected[-1], "message": str(error)},
    }


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_request_error_survives_pickling(error: RequestError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert openai_error_body(copy) == openai_error_body(error)
    assert error_headers(copy) == error_headers(error)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (OverloadedError("demo", 7, 2.1), {"Retry-After": "3"}),
        (NoEngineInTimeError("demo", 60.0, 0.0), {"Retry-After": "1"}),
        (CannotResumeError("no engine left", 1.0), {"Retry-After": "1"}),
        (CannotResumeError("n > 1"), {"x-should-retry": "false"}),
        (PoisonRequestError(3), {"x-should-retry": "false"}),
        (UnauthorizedError(), {"WWW-Authenticate": "Bearer"}),
        (ExpiredKeyError("ci", "now"), {"WWW-Authenticate": "Bearer"}),
        (WrongMethodError("PUT", "/fleet", ["GET", "HEAD"]), {"Allow": "GET, HEAD"}),
        (UnknownModelError("gpt-9"), {}),
    ],
    ids=name_of,
)
def test_headers_say_whether_and_when_to_retry(
    error: RequestError, headers: dict[str, str]
) -> None:
    assert error_headers(error) == headers


def test_poison_request_says_how_many_engines_it_took_down() -> None:
    assert "3 engines" in str(PoisonRequestError(3))


def test_unknown_model_lists_what_is_served() -> None:
    message = str(UnknownModelError("gpt-9", ["demo", "sql"]))
    assert "'gpt-9'" in message
    assert "demo, sql" in message


def test_malformed_request_carries_a_code_when_given_one() -> None:
    body = openai_error_body(MalformedRequestError("too long", "messages", "context_length"))
    assert body["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length",
    }


def test_config_error_lists_every_problem_and_survives_pickling() -> None:
    error = ConfigError(
        [
            Problem("gateway.replicas", "not allowed", "allowed: an integer, 1 to 1024", "0"),
            Problem("models", "missing", "required: a list"),
        ]
    )
    lines = str(pickle.loads(pickle.dumps(error))).splitlines()
    assert lines == [
        "2 problems in the configuration:",
        "  gateway.replicas: not allowed (value 0); allowed: an integer, 1 to 1024",
        "  models: missing; required: a list",
    ]


def test_every_error_is_caught_by_the_base() -> None:
    assert all(isinstance(error, SlicewiseError) for error in [*ERRORS, ConfigError([])])


@pytest.mark.parametrize(
    "error",
    [
        UnknownModelError("m" * 10_000, ["demo"]),
        ForbiddenError("ci", "model", "m" * 10_000, ["demo"]),
        UnknownRouteError("/" + "m" * 10_000),
    ],
)
def test_what_a_client_asked_for_is_repeated_to_it_in_part(error: RequestError) -> None:
    assert 200 <= len(error.message) < 300
    assert "m" * 150 in error.message
