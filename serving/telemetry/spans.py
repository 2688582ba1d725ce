"""The seam to OpenTelemetry: all that the rest of Slicewise knows of tracing.

Owns the two protocols and their empty implementation. Knows no OpenTelemetry, and neither do its
users: `open_tracer` has a module of its own. A request that is not sampled has no span, so that it
costs only a check for `None`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]


class SpanKind(StrEnum):
    """The side of a call that a span describes, as OpenTelemetry names it."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


class Span(Protocol):
    """The work of one sampled request, from its making to `end`. Used from one thread.

    Times are wall-clock nanoseconds since 1970; `None` means now.
    """

    @property
    def trace_id(self) -> str:
        """The 32 hex digits that all spans of a request share."""
        ...

    @property
    def traceparent(self) -> str:
        """The value that makes another process's spans children of this one (W3C Trace Context)."""
        ...

    def child(self, name: str, kind: SpanKind, attributes: Attributes) -> "Span":
        """Begins a span for a part of this work."""
        ...

    def event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None:
        """Records an event."""
        ...

    def annotate(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""
        ...

    def end(self, error: str | None = None) -> None:
        """Ends it, failed with `error` if there is one. A second end is ignored."""
        ...


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """The counts of ended spans of one process; spans that wait to be sent are in none."""

    num_sent: int = 0
    num_dropped: int = 0  # the collector was away or too slow


class Tracer(Protocol):
    """The source of each request's first span in a process. Used from one thread."""

    @property
    def is_on(self) -> bool:
        """True if any request can have a span."""
        ...

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Span | None:
        """Returns the request's span here, `None` when the request is not sampled.

        A valid `traceparent` carries the sender's decision; without one, chance decides.
        """
        ...

    @property
    def counts(self) -> SpanCounts:
        """The counts of the spans so far."""
        ...

    def close(self, timeout_s: float) -> None:
        """Sends what waits, within the time limit, and stops. Blocks. Idempotent."""
        ...


class NoTracer:
    """The `Tracer` without spans, for tracing that is off."""

    is_on = False

    def begin(
        self,
        name: str,  # noqa: ARG002 - the protocol's
        kind: SpanKind,  # noqa: ARG002
        attributes: Attributes,  # noqa: ARG002
        traceparent: str = "",  # noqa: ARG002
        tracestate: str = "",  # noqa: ARG002
    ) -> Span | None:
        """Implements `Tracer.begin`."""
        return None

    @property
    def counts(self) -> SpanCounts:
        """Implements `Tracer.counts`."""
        return SpanCounts()

    def close(self, timeout_s: float) -> None:
        """Implements `Tracer.close`."""


NO_TRACER = NoTracer()


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The destination of spans and the share of requests that have any.

    `otlp_endpoint` is the base address of an OTLP/HTTP collector; `None` turns tracing off.
    `sample_ratio` is the share of requests without a `traceparent` that are sampled, 0 to 1.
    """

    otlp_endpoint: str | None = None
    sample_ratio: float = 1.0


NO_TRACES = TraceSettings()
