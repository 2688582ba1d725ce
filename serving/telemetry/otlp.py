"""Makes spans with OpenTelemetry's SDK and sends them to a collector by OTLP over HTTP.

Owns the sampling of requests, the bound of the queue, the count of dropped spans and the time limit
of closing. Does not own the content of the spans, nor the queue and the thread that empties it:
those are the SDK's `BatchSpanProcessor`. A full queue drops what comes next.

The exporter reads further settings from the environment of its process. The most useful one is
`OTEL_EXPORTER_OTLP_HEADERS`, which keeps a collector's key out of configuration files.
"""

import logging
import random
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.telemetry.spans import Attributes, Span, SpanCounts, SpanKind

logger = logging.getLogger(__name__)

# Some seconds of a busy gateway's spans at about 2 KB each; beyond it they are dropped.
MAX_QUEUED = 8192
_BATCH = 512
_PERIOD_MS = 1000
# For one batch, attempts to send it again included.
SEND_TIMEOUT_S = 5.0

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
_PROPAGATOR = TraceContextTextMapPropagator()
# The exporter's own logger warns of every batch, and again of every attempt.
_EXPORTER_LOGGER = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")


class OtlpTracer:
    """The `Tracer` that sends its spans to a collector."""

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
        """Opens the tracer; `chance` decides who is sampled, `None` is the system's randomness."""
        self._processor = _CountingProcessor(_CountingExporter(endpoint))
        self._closing: threading.Thread | None = None
        # No detectors of resources: they may ask other machines, which takes time.
        resource = Resource({"service.name": service, "service.instance.id": instance})
        # Sampling is decided in `begin`; whatever reaches the SDK is sampled.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._processor)
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
        """Implements `Tracer.begin`."""
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
        """Implements `Tracer.counts`."""
        return self._processor.counts

    @property
    def num_open(self) -> int:
        """The number of spans that were begun and not ended."""
        return self._processor.num_open

    def flush(self) -> None:
        """Sends the waiting spans. Blocks as long as that takes."""
        self._processor.force_flush()

    def close(self, timeout_s: float) -> None:
        """Implements `Tracer.close`."""
        if self._closing is not None:
            return
        until_s = time.monotonic() + timeout_s
        # The SDK waits for its own thread, and takes no time limit for that.
        self._closing = threading.Thread(
            target=self._processor.shutdown, name="otlp-close", daemon=True
        )
        self._closing.start()
        self._closing.join(timeout_s * 0.75)
        if self._closing.is_alive():
            self._processor.exporter.give_up()
            self._closing.join(max(0.0, until_s - time.monotonic()))

    def join(self) -> None:
        """Waits, after `close`, until its thread has ended."""
        if self._closing is not None:
            self._closing.join()


class OtlpSpan:
    """The `Span` over a span of the SDK."""

    __slots__ = ("_has_ended", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._has_ended = False

    @property
    def trace_id(self) -> str:
        """Implements `Span.trace_id`."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """Implements `Span.traceparent`."""
        return f"00-{self.trace_id}-{self._span.get_span_context().span_id:016x}-01"

    def child(self, name: str, kind: SpanKind, attributes: Attributes) -> Span:
        """Implements `Span.child`."""
        context = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(name, context, _KINDS[kind], dict(attributes))
        return OtlpSpan(self._tracer, span)

    def event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None:
        """Implements `Span.event`."""
        self._span.add_event(name, dict(attributes), at_ns)

    def annotate(self, attributes: Attributes) -> None:
        """Implements `Span.annotate`."""
        self._span.set_attributes(dict(attributes))

    def end(self, error: str | None = None) -> None:
        """Implements `Span.end`."""
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class _CountingProcessor(BatchSpanProcessor):
    """The SDK's queue and thread, with counts and a bound that drops the newest span.

    The SDK drops the oldest at its own bound and logs that on the event loop. Its bound is never
    reached, because the spans that are being sent count as queued here.
    """

    def __init__(self, exporter: "_CountingExporter") -> None:
        super().__init__(
            exporter,
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=_PERIOD_MS,
            max_export_batch_size=_BATCH,
        )
        self.exporter = exporter
        self._num_begun = self._num_ended = self._num_refused = 0
        self._is_closed = False

    @property
    def counts(self) -> SpanCounts:
        sent = self.exporter.counts
        return SpanCounts(sent.num_sent, sent.num_dropped + self._num_refused)

    @property
    def num_open(self) -> int:
        return self._num_begun - self._num_ended

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:  # noqa: ARG002 - the SDK's
        self._num_begun += 1

    def on_end(self, span: ReadableSpan) -> None:
        counts = self.counts
        num_queued = self._num_ended - counts.num_sent - counts.num_dropped
        self._num_ended += 1
        if self._is_closed or num_queued >= MAX_QUEUED:
            self._num_refused += 1
        else:
            super().on_end(span)

    def shutdown(self) -> None:
        self._is_closed = True
        super().shutdown()  # type: ignore[no-untyped-call]


class _CountingExporter(SpanExporter):
    """The SDK's exporter, with counts and one log line where it has one for every attempt.

    The processor calls `export` from one thread at a time.
    """

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_TIMEOUT_S
        )
        self._endpoint = endpoint
        self._excuse = _Excuse()
        self._is_failing = False
        self._is_shut_down = threading.Event()
        self.counts = SpanCounts()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down.is_set():
            result = SpanExportResult.FAILURE
        else:
            result = self._export(spans)
            self._report(has_arrived=result is SpanExportResult.SUCCESS)
        num_sent, num_dropped = self.counts.num_sent, self.counts.num_dropped
        if result is SpanExportResult.SUCCESS:
            num_sent += len(spans)
        else:
            num_dropped += len(spans)
        self.counts = SpanCounts(num_sent, num_dropped)
        return result

    def give_up(self) -> None:
        """Ends the pause before the next attempt, not a call that is under way."""
        if not self._is_shut_down.is_set():
            self._is_shut_down.set()
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def shutdown(self) -> None:
        self.give_up()

    def _export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _EXPORTER_LOGGER.addFilter(self._excuse)
        try:
            return self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - must not end the thread
            self._excuse.reason = repr(error)
            return SpanExportResult.FAILURE
        finally:
            _EXPORTER_LOGGER.removeFilter(self._excuse)

    def _report(self, *, has_arrived: bool) -> None:
        """Logs one line when the collector goes away, and one when it is back."""
        if has_arrived != self._is_failing:
            return
        self._is_failing = not has_arrived
        if has_arrived:
            num_dropped = self.counts.num_dropped
            logger.info("collector_back endpoint=%s dropped=%d", self._endpoint, num_dropped)
        else:
            reason = self._excuse.reason
            logger.warning("collector_unreachable endpoint=%s reason=%r", self._endpoint, reason)


class _Excuse(logging.Filter):
    """Suppresses the exporter's log lines; `reason` is the last of them."""

    reason = "unknown"

    def filter(self, record: logging.LogRecord) -> bool:
        self.reason = record.getMessage()
        return False
