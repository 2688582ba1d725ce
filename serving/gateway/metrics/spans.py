"""Presents how many spans a gateway sent and dropped, as a Prometheus family."""

from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.gateway.metrics.requests import Families
from serving.telemetry.spans import Tracer


class SpanCollector(Collector):
    """Collects spans sent and dropped. Without tracing there are none, and no series."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def collect(self) -> Iterator[Family]:
        """Yields the present family."""
        if not self._tracer.is_on:
            return
        families, counts = Families(), self._tracer.counts
        name = "slicewise_trace_spans_total"
        families.add(name, {"outcome": "sent"}, counts.num_sent)
        families.add(name, {"outcome": "dropped"}, counts.num_dropped)
        yield from families
