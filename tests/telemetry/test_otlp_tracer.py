"""Spans on their way to a collector: what it gets, and what happens when it is not there."""

import logging
import random
import socket
import subprocess
import sys
import time

import pytest

from serving.telemetry.open_tracer import open_tracer
from serving.telemetry.otlp import MAX_QUEUED, SEND_TIMEOUT_S, OtlpTracer
from serving.telemetry.spans import NO_TRACER, SpanCounts, SpanKind, TraceSettings

from .collector import DEADLINE_S, collecting, tracer_to

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_spans_arrive_with_their_tree_attributes_events_and_service() -> None:
    with collecting() as (collector, endpoint):
        tracer = tracer_to(f"{endpoint}/")
        root = tracer.begin("root", SpanKind.SERVER, {"a": 1})
        assert root is not None
        child = root.child("child", SpanKind.CLIENT, {"b": "two"})
        child.event("seen", {}, at_ns=5)
        child.end("lost")
        root.annotate({"c": True})
        root.end()
        root.end()
        tracer.close(DEADLINE_S)
    assert collector.paths == {"/v1/traces"}
    assert collector.tree() == {"": ["root"], "root": ["child"]}
    (seen_root,), (seen_child,) = collector.named("root"), collector.named("child")
    assert (seen_root.service, seen_root.attributes) == ("gateway", {"a": 1, "c": True})
    assert (seen_root.trace_id, seen_root.is_error) == (root.trace_id, False)
    assert seen_child.attributes == {"b": "two", "error.type": "lost"}
    assert (seen_child.events, seen_child.is_error) == ({"seen": 5}, True)
    assert (tracer.counts, tracer.num_open) == (SpanCounts(num_sent=2), 0)


def test_traceparent_of_the_client_is_the_parent() -> None:
    with collecting() as (collector, endpoint):
        tracer = tracer_to(endpoint, sample_ratio=0.0)
        span = tracer.begin("request", SpanKind.SERVER, {}, CLIENTS, "vendor=1")
        assert span is not None
        assert span.traceparent.startswith(CLIENTS[:36])
        span.end()
        tracer.close(DEADLINE_S)
    (seen,) = collector.spans
    assert (seen.trace_id, seen.parent_id) == (CLIENTS[3:35], CLIENTS[36:52])


@pytest.mark.parametrize(
    ("traceparent", "sample_ratio", "is_sampled"),
    [
        ("", 0.0, False),
        ("", 1.0, True),
        (CLIENTS, 0.0, True),
        (CLIENTS[:-1] + "0", 1.0, False),  # its sender has decided against
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", 0.0, False),  # not valid: as if there were none
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", 1.0, True),
        ("nonsense\r\n", 1.0, True),
        ("nonsense", 0.0, False),
    ],
)
def test_who_is_sampled(traceparent: str, sample_ratio: float, is_sampled: bool) -> None:
    with collecting() as (_, endpoint):
        tracer = tracer_to(endpoint, sample_ratio=sample_ratio)
        span = tracer.begin("request", SpanKind.SERVER, {}, traceparent)
        assert (span is not None) == is_sampled
        tracer.close(DEADLINE_S)


def test_share_of_sampled_requests_is_the_one_asked_for() -> None:
    with collecting() as (_, endpoint):
        tracer = OtlpTracer(endpoint, 0.25, service="s", instance="i", chance=random.Random(7))
        begun = [tracer.begin("r", SpanKind.SERVER, {}) for _ in range(2000)]
        tracer.close(DEADLINE_S)
    assert 450 < sum(span is not None for span in begun) < 550


def test_collector_that_is_away_costs_counted_drops_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer = tracer_to(f"http://127.0.0.1:{closed_port()}")
    num_spans = MAX_QUEUED + 2000
    for _ in range(num_spans):
        span = tracer.begin("r", SpanKind.SERVER, {})
        assert span is not None
        span.end()
    tracer.close(0.5)
    tracer.close(0.5)
    tracer.join()
    assert tracer.counts == SpanCounts(num_sent=0, num_dropped=num_spans)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage().split()[0] for record in warnings] == ["collector_unreachable"]


def test_closing_waits_no_longer_for_a_silent_collector_than_it_is_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = tracer_to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        late, span = (tracer.begin("r", SpanKind.SERVER, {}) for _ in range(2))
        assert late is not None
        assert span is not None
        span.end()
        began_s = time.monotonic()
        tracer.close(0.2)
        assert time.monotonic() - began_s < SEND_TIMEOUT_S
        late.end()
    tracer.join()
    assert tracer.counts == SpanCounts(num_sent=0, num_dropped=2)


def test_collector_that_refuses_drops_and_one_that_is_back_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "serving.telemetry")
    with collecting() as (collector, endpoint):
        collector.status = 400
        tracer = tracer_to(endpoint)
        for status, counts in ((400, SpanCounts(0, 1)), (200, SpanCounts(1, 1))):
            collector.status = status
            span = tracer.begin("r", SpanKind.SERVER, {})
            assert span is not None
            span.end()
            tracer.flush()
            assert tracer.counts == counts
        tracer.close(DEADLINE_S)
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith(f"collector_unreachable endpoint={endpoint} reason=")
    assert "400" in told[0]
    assert told[1:] == [f"collector_back endpoint={endpoint} dropped=1"]


def test_tracing_that_is_off_has_no_spans() -> None:
    tracer = open_tracer(TraceSettings(), "service", "instance")
    assert tracer is NO_TRACER
    assert tracer.begin("r", SpanKind.SERVER, {}, CLIENTS) is None


_PROBE = """
import sys
import serving.gateway.edge.http, serving.link.server, serving.engine.host
from serving.telemetry.open_tracer import open_tracer
from serving.telemetry.spans import TraceSettings
open_tracer(TraceSettings(), "service", "instance")
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_tracing_that_is_off_imports_no_opentelemetry() -> None:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True
    )
    assert probe.stdout.strip() == "[]"
