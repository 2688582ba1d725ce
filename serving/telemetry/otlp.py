"""Spans made by OpenTelemetry's SDK and sent to a collector by OTLP over HTTP.

Owns the sampling of requests, the queue between the event loop and the collector, and the count of
what is dropped. Does not own what the spans say. The event loop makes spans and puts them into the
queue; a thread of its own encodes and sends them. A full queue drops what comes next.

What the exporter takes from the environment of its process is its own business: most useful is
`OTEL_EXPORTER_OTLP_HEADERS`, in which a collector's key does not pass through a configuration file.
"""

import logging
import random
import threading
import time
from collections import deque

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.telemetry.spans import Attributes, Span, SpanCounts, SpanKind

logger = logging.getLogger(__name__)

# Some seconds of a busy gateway's spans at about 2 KB each; beyond it they are dropped.
MAX_QUEUED = 8192
_BATCH = 512
_PERIOD_S = 1.0
# For one batch, attempts to send it again included.
_SEND_TIMEOUT_S = 5.0

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
_PROPAGATOR = TraceContextTextMapPropagator()
# It warns of every batch, and again of every attempt.
_EXPORTER_LOGGER = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")


class OtlpTracer:
    """A `Tracer` whose spans go to a collector."""

    is_on = True

    def __init__(
        self,
        endpoint: str,
        sample_ratio: float,
        *,
        service: str,
        instance: str,
        chance: random.Random | None = None,
    ) -> None:
        """`chance` decides who is sampled; `None`: by the system's randomness."""
        exporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT_S
        )
        self._sender = _Sender(exporter, endpoint)
        # No detectors of resources: they ask machines around us, and take their time.
        resource = Resource({"service.name": service, "service.instance.id": instance})
        # Sampling is decided in `begin`; whatever reaches the SDK is sampled.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._sender)
        self._tracer = self._provider.get_tracer("slicewise")
        self._sample_ratio = sample_ratio
        self._chance = chance or random.SystemRandom()

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Span | None:
        """See `Tracer`."""
        context = None
        if traceparent:
            carrier = {"traceparent": traceparent, "tracestate": tracestate}
            context = _PROPAGATOR.extract(carrier)
        parent = trace.get_current_span(context).get_span_context() if context else None
        if parent is not None and parent.is_valid:
            if not parent.trace_flags.sampled:
                return None
        elif self._chance.random() >= self._sample_ratio:
            return None
        return OtlpSpan(
            self._tracer,
            self._tracer.start_span(name, context, _KINDS[kind], dict(attributes)),
        )

    @property
    def counts(self) -> SpanCounts:
        """See `Tracer`."""
        return self._sender.counts

    @property
    def num_open(self) -> int:
        """Spans that were begun and not ended."""
        return self._sender.num_open

    def flush(self) -> None:
        """Sends what waits now. Blocks as long as that takes."""
        self._sender.flush()

    def close(self, timeout_s: float) -> None:
        """See `Tracer`."""
        self._sender.close(timeout_s)

    def join(self) -> None:
        """Waits, after `close`, until nothing of it runs."""
        self._sender.join()


class OtlpSpan:
    """A `Span` of the SDK."""

    __slots__ = ("_has_ended", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._has_ended = False

    @property
    def trace_id(self) -> str:
        """See `Span`."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        return f"00-{self.trace_id}-{self._span.get_span_context().span_id:016x}-01"

    def child(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        """See `Span`."""
        context = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(name, context, _KINDS[kind], dict(attributes))
        return OtlpSpan(self._tracer, span)

    def event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None:
        """See `Span`."""
        self._span.add_event(name, dict(attributes), at_ns)

    def annotate(self, attributes: Attributes) -> None:
        """See `Span`."""
        self._span.set_attributes(dict(attributes))

    def end(self, error: str | None = None) -> None:
        """See `Span`."""
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class _Sender(SpanProcessor):
    """The queue of ended spans and the thread that empties it."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._is_given_up = False
        self._is_failing = False
        self._sending = threading.Lock()  # held by who sends, who alone writes the last two
        self._num_begun = self._num_ended = self._num_refused = 0
        self._num_sent = self._num_failed = 0
        self._excuse = _Excuse()
        self._thread = threading.Thread(target=self._run, name="otlp-sender", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> SpanCounts:
        return SpanCounts(self._num_sent, self._num_refused + self._num_failed)

    @property
    def num_open(self) -> int:
        return self._num_begun - self._num_ended

    def on_start(self, span: object, parent_context: object = None) -> None:  # noqa: ARG002 - the SDK's
        self._num_begun += 1

    def on_end(self, span: ReadableSpan) -> None:
        self._num_ended += 1
        if len(self._queue) >= MAX_QUEUED or self._is_closing:
            self._num_refused += 1
            return
        self._queue.append(span)
        if len(self._queue) == _BATCH:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        if self._is_closing:
            return
        until_s = time.monotonic() + timeout_s
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout_s * 0.75)
        if self._thread.is_alive():
            # Ends the pause before the next attempt, not a call that is under way.
            self._is_given_up = True
            self._exporter.shutdown()
            self._thread.join(max(0.0, until_s - time.monotonic()))

    def join(self) -> None:
        self._thread.join()

    def flush(self) -> None:
        self._send_all()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            self._send_all()
        self._send_all()
        with self._sending:
            self._num_failed += len(self._queue)
            self._queue.clear()
        if not self._is_given_up:
            self._exporter.shutdown()

    def _send_all(self) -> None:
        with self._sending:
            while self._queue and not self._is_given_up:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                self._send(batch)

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            has_come = self._export(batch)
        except Exception as error:  # noqa: BLE001 - a trace is worth no thread
            has_come, self._excuse.reason = False, repr(error)
        if has_come:
            self._num_sent += len(batch)
        else:
            self._num_failed += len(batch)
        self._tell(has_come=has_come)

    def _export(self, batch: list[ReadableSpan]) -> bool:
        _EXPORTER_LOGGER.addFilter(self._excuse)
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        finally:
            _EXPORTER_LOGGER.removeFilter(self._excuse)

    def _tell(self, *, has_come: bool) -> None:
        """One line when the collector goes away, one when it is back."""
        if has_come != self._is_failing:
            return
        self._is_failing = not has_come
        if has_come:
            num_dropped = self.counts.num_dropped
            logger.info("collector_back endpoint=%s dropped=%d", self._endpoint, num_dropped)
        else:
            reason = self._excuse.reason
            logger.warning("collector_unreachable endpoint=%s reason=%r", self._endpoint, reason)


class _Excuse(logging.Filter):
    """Keeps the exporter's words to itself: `reason` is the last of them."""

    reason = "unknown"

    def filter(self, record: logging.LogRecord) -> bool:
        self.reason = record.getMessage()
        return False
