"""A page with every series of the registry, made by the code that makes the real ones."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from threading import Thread
from typing import Self

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from vocabulary import CLOSED

from serving.gateway.metrics.page import render_metrics
from serving.gateway.metrics.requests import Families
from serving.gateway.telemetry.request_metrics import Histogram
from serving.telemetry.metric_names import ALL, Kind, Metric, labels_of

_VALUES = {"slice": "slice-0", "model": "chat", "compute_class": "spot", "worker": "0"}
_BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0)


class EveryMetric(Collector):
    """Every metric of the TPU exporter or of a gateway; counters grow with time."""

    def __init__(self, *, of_tpu: bool) -> None:
        self._metrics = [each for each in ALL.values() if each.name.startswith("tpu_") == of_tpu]
        self._began_s = time.time()

    def collect(self) -> Iterator[Family]:
        now_s = time.time()
        families = Families()
        for metric in self._metrics:
            for labels in _label_sets(metric):
                families.add(metric.name, labels, _value(metric, now_s, now_s - self._began_s + 1))
        yield from families


def _label_sets(metric: Metric) -> Iterator[Mapping[str, str]]:
    closed = CLOSED.get(metric.name, {})
    names = [name for name in labels_of(metric) if name != "gateway"]
    choices = [sorted(closed.get(name, {_VALUES.get(name, f"a {name}")})) for name in names]
    for values in product(*choices):
        yield dict(zip(names, values, strict=True))


def _value(metric: Metric, now_s: float, elapsed_s: float) -> float | Histogram:
    if metric.kind == Kind.HISTOGRAM:
        histogram = Histogram(_BOUNDS)
        histogram.counts = [int(10 * elapsed_s)] * (len(_BOUNDS) + 1)
        histogram.total = elapsed_s
        return histogram
    if metric.name.endswith("_time_seconds"):
        return now_s + (60 if "next" in metric.name else -5)
    return elapsed_s if metric.kind == Kind.COUNTER else 1.0


class StagedPages:
    """Serves `/gateway/metrics` and `/metrics`, which is a TPU exporter's. A context manager."""

    def __init__(self) -> None:
        gateway = CollectorRegistry(auto_describe=False)
        gateway.register(EveryMetric(of_tpu=False))
        ProcessCollector(registry=gateway)
        tpu = CollectorRegistry(auto_describe=False)
        tpu.register(EveryMetric(of_tpu=True))
        pages = {"/gateway/metrics": ([gateway], "g1"), "/metrics": ([tpu], None)}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = asyncio.run(render_metrics(*pages[self.path]))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
