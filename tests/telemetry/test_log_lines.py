"""Log lines as text and as JSON, and where they go."""

import io
import json
import logging
from logging.handlers import MemoryHandler

import pytest

from serving.telemetry.log_lines import JsonLines, facts_of, log_traced
from serving.telemetry.process_log import LogStyle, log_as_actor, log_as_replica

NAMES = ("serving", "vllm", "ray.serve")


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    """What a process sets for itself is taken back: other tests look at the same loggers."""
    before = [
        (logger, logger.level, logger.propagate, list(logger.handlers))
        for logger in map(logging.getLogger, NAMES)
    ]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


@pytest.mark.parametrize(
    ("template", "args", "event", "facts"),
    [
        ("drain_begins", (), "drain_begins", {}),
        ("ended id=%s tokens=%d", ("r", 3), "ended", {"id": "r", "tokens": 3}),
        (
            "link listens engine_id=%s address=%s:%d",
            ("e", "::1", 80),
            "link listens",
            {"engine_id": "e", "address": "::1:80"},
        ),
        ("lost reason=%r", ("two words = one",), "lost", {"reason": "two words = one"}),
        ("lost reason=%.3r", ("abcdef",), "lost", {"reason": "'ab"}),
        ("took for_s=%.1f slice=%s", (0.25, None), "took", {"for_s": 0.25, "slice": None}),
        ("passed slice=%s %s", ("s", "all 4 chips"), "passed all 4 chips", {"slice": "s"}),
        ("full share=%d%% of=%s", (7, "a"), "full", {"share": "7%", "of": "a"}),
    ],
)  # fmt: skip
def test_facts_are_the_templates(
    template: str, args: tuple[object, ...], event: str, facts: dict[str, object]
) -> None:
    assert facts_of(template, args) == (event, facts)


def record_of(template: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("serving.x", logging.INFO, "x.py", 1, template, args, None)


def test_json_line_is_one_object_with_typed_facts() -> None:
    record = record_of("routed request_id=%s engines=%d", "a\nb", 2)
    record.created = 1_795_226_400.25
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2026-11-21T02:00:00.250+00:00",
        "level": "INFO",
        "logger": "serving.x",
        "event": "routed",
        "request_id": "a\nb",
        "engines": 2,
    }


def test_fact_may_not_pass_for_the_level() -> None:
    assert json.loads(JsonLines().format(record_of("x level=%s", "low"))) | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "logger": "serving.x",
        "event": "x",
        "level_": "low",
    }


def test_line_that_is_none_of_ours_keeps_its_text() -> None:
    record = record_of("took %(s)s s", {"s": 3})
    assert json.loads(JsonLines().format(record))["event"] == "took 3 s"


def test_line_of_a_sampled_request_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("serving.test")
    log_traced(logger, logging.WARNING, "4bf9", "refused request_id=%s", "r")
    log_traced(logger, logging.WARNING, None, "refused request_id=%s", "r")
    assert [record.getMessage() for record in caplog.records] == [
        "refused request_id=r trace_id=4bf9",
        "refused request_id=r",
    ]


def test_actor_writes_json_from_its_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_actor(LogStyle(is_json=True, level=logging.DEBUG))
    logging.getLogger("serving.test").debug("routed engine_id=%s", "e")
    assert json.loads(capsys.readouterr().err)["engine_id"] == "e"


def test_replica_writes_its_lines_as_json_into_serves_file_and_leaves_serves_alone() -> None:
    file = io.StringIO()
    target = logging.StreamHandler(file)
    target.setFormatter(logging.Formatter("serve says %(message)s"))
    serve = logging.getLogger("ray.serve")
    serve.handlers[:] = [MemoryHandler(1, target=target)]
    log_as_replica(LogStyle(is_json=True))
    logging.getLogger("serving.test").info("routed engine_id=%s", "e")
    serve.warning("hello")
    ours, serves = file.getvalue().splitlines()
    assert json.loads(ours)["engine_id"] == "e"
    assert serves == "serve says hello"
