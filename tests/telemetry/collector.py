"""An OTLP collector for tests: takes spans over HTTP on a port of this machine, and keeps them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving.telemetry.otlp import OtlpTracer

DEADLINE_S = 30.0


@dataclass(frozen=True)
class SeenSpan:
    """One span as it came over the wire. `parent_id` is empty for a root."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: dict[str, int]
    start_ns: int
    end_ns: int
    is_error: bool


class Collector:
    """The spans that have come, and what is answered to their senders."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.status = 200
        self.paths: set[str] = set()
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> int:
        message = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.paths.add(path)
            if self.status == 200:
                self.spans += _spans_of(message)
            self._changed.notify_all()
        return self.status

    def named(self, name: str) -> list[SeenSpan]:
        """The spans of this name, in order of their start."""
        return sorted((s for s in self.spans if s.name == name), key=lambda span: span.start_ns)

    def tree(self) -> dict[str, list[str]]:
        """The names of the children by the name of the parent, in order of their start.

        A span whose parent is not here stands under an empty name.
        """
        by_id = {span.span_id: span for span in self.spans}
        children: dict[str, list[str]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_ns):
            parent = by_id.get(span.parent_id)
            children.setdefault("" if parent is None else parent.name, []).append(span.name)
        return children


def _spans_of(message: ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for resource in message.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    service,
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    _values(span.attributes),
                    {event.name: event.time_unix_nano for event in span.events},
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector on a free port of this machine, and its address."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(collector.take(self.path, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tracer_to(endpoint: str, service: str = "gateway", sample_ratio: float = 1.0) -> OtlpTracer:
    return OtlpTracer(endpoint, sample_ratio, service=service, instance=f"{service}-0")
