"""The seam to OpenTelemetry: what the rest of Slicewise may know of tracing.

Owns the two protocols and their empty implementation. Knows no OpenTelemetry, and neither does who
uses it: `open_tracer` has a module of its own. A request that is not sampled has no span, so that a
check for `None` is all that it costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]


class SpanKind(StrEnum):
    """The side of a call that a span is of, as OpenTelemetry names it."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


class Span(Protocol):
    """Some work of one sampled request, from its making to `end`. Used from one thread.

    Times are wall-clock nanoseconds since 1970; `None` means now.
    """

    @property
    def trace_id(self) -> str:
        """32 hex digits, the same for all spans of a request."""
        ...

    @property
    def traceparent(self) -> str:
        """Returns what makes another process's spans children of this one (W3C Trace Context)."""
        ...

    def child(self, name: str, kind: SpanKind, attributes: Attributes) -> "Span":
        """Begins work that is part of this."""
        ...

    def event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None:
        """Notes that something happened."""
        ...

    def annotate(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""
        ...

    def end(self, error: str | None = None) -> None:
        """Ends it, failed with `error` if there is one. A second end is none."""
        ...


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """What became of the spans of one process; those that wait to be sent are in none."""

    num_sent: int = 0
    num_dropped: int = 0  # the collector was away or too slow


class Tracer(Protocol):
    """Where requests get their first span of a process. Used from one thread."""

    @property
    def is_on(self) -> bool:
        """Returns whether any request can have one."""
        ...

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Span | None:
        """The request's span here, `None` when the request is not sampled.

        With a valid `traceparent` its sender has decided that; without, chance does.
        """
        ...

    @property
    def counts(self) -> SpanCounts:
        """Returns what became of the spans so far."""
        ...

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for so long at most, and stops. Blocks. Idempotent."""
        ...


class NoTracer:
    """Tracing that is off: a `Tracer` without spans."""

    is_on = False

    def begin(
        self,
        name: str,  # noqa: ARG002 - the protocol's
        kind: SpanKind,  # noqa: ARG002
        attributes: Attributes,  # noqa: ARG002
        traceparent: str = "",  # noqa: ARG002
        tracestate: str = "",  # noqa: ARG002
    ) -> Span | None:
        """See `Tracer`."""
        return None

    @property
    def counts(self) -> SpanCounts:
        """See `Tracer`."""
        return SpanCounts()

    def close(self, timeout_s: float) -> None:
        """See `Tracer`."""


NO_TRACER = NoTracer()


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go and how many requests have any.

    `otlp_endpoint` is the base address of an OTLP/HTTP collector; `None` turns tracing off.
    `sample_ratio` is the share of requests without a `traceparent` that are sampled, 0 to 1.
    """

    otlp_endpoint: str | None = None
    sample_ratio: float = 1.0


NO_TRACES = TraceSettings()
