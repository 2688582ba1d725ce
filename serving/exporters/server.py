"""The exporter's HTTP side: two pages and a health check.

Owns the paths, the budget that Prometheus grants a scrape, and how many scrapes run at a time. Does
not own what the pages show, nor HTTP, text formats and compression, which are
`prometheus_client`'s.
"""

import math
import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from wsgiref.simple_server import WSGIRequestHandler
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import Metric, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from serving.exporters.exposition import device_plugin_families, families
from serving.exporters.scrape import Exporter

METRICS_PATH = "/metrics"
# Ray adds `/metrics` to the value of TPU_DEVICE_PLUGIN_ADDR.
DEVICE_PLUGIN_PATH = "/compat/gke-device-plugin/metrics"
HEALTH_PATH = "/healthz"

# Prometheus sends this header with each scrape. A part of that time is left for the network.
_TIMEOUT_KEY = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"
_BUDGET_SHARE = 0.8
# A page takes milliseconds, so more than this at a time is a mistake or an attack.
_MAX_SCRAPES = 8
# A connection on which nothing comes for this long is closed.
_IDLE_S = 30.0


class ExporterServer(ThreadingWSGIServer):
    """Serves an exporter's pages; port 0 takes a free one (`port`).

    Beyond 8 scrapes at a time it answers 503. Collectors that fail do not show in the status: a
    page that is there with a reason on it is worth more than an error.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        super().__init__((host, port), _Connection)
        self.set_app(_Pages(exporter))

    def server_bind(self) -> None:
        """Binds the address; does not ask DNS for its name, which `HTTPServer` does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = f"{self.server_address[0]!s}", self.port
        self.setup_environ()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])


class _Connection(WSGIRequestHandler):
    timeout = _IDLE_S

    def handle(self) -> None:
        # A client that sends nothing, or goes away, is no fault of ours.
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a line for each scrape is noise."""


class _Pages:
    """The WSGI application: `prometheus_client`'s own for the pages, below a bound and a budget."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._process = ProcessCollector(registry=None)
        self._places = threading.BoundedSemaphore(_MAX_SCRAPES)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == HEALTH_PATH:
            return _text(start_response, HTTPStatus.OK, "ok\n")
        if path not in (METRICS_PATH, DEVICE_PLUGIN_PATH):
            known = f"{METRICS_PATH} {DEVICE_PLUGIN_PATH} {HEALTH_PATH}\n"
            return _text(start_response, HTTPStatus.NOT_FOUND, known)
        if not self._places.acquire(blocking=False):
            busy = "too many scrapes at a time\n"
            return _text(start_response, HTTPStatus.SERVICE_UNAVAILABLE, busy)
        try:
            collect = self._collect_page if path == METRICS_PATH else self._collect_plugin_page
            scrape = _Scrape(partial(collect, budget_s(environ.get(_TIMEOUT_KEY))))
            # The registry of one request: its collection has that request's budget. A query
            # chooses nothing here.
            page: WSGIApplication = make_wsgi_app(scrape)
            return page({**environ, "QUERY_STRING": ""}, start_response)
        finally:
            self._places.release()

    def _collect_page(self, budget_s: float | None) -> Iterable[Metric]:
        return [*families(self._exporter.scrape(budget_s)), *self._process.collect()]

    def _collect_plugin_page(self, budget_s: float | None) -> Iterable[Metric]:
        series = self._exporter.scrape(budget_s)
        return device_plugin_families(series, self._exporter.facts.identity)


@dataclass(frozen=True, slots=True)
class _Scrape:
    """The `Collector` of `prometheus_client` that scrapes when it is collected."""

    collect: Callable[[], Iterable[Metric]]


def _text(start_response: StartResponse, status: HTTPStatus, text: str) -> list[bytes]:
    headers = [("Content-Type", "text/plain; charset=utf-8")]
    start_response(f"{status.value} {status.phrase}", headers)
    return [text.encode()]


def budget_s(header: str | None) -> float | None:
    """Returns the time that the asker's own timeout allows a scrape; `None` if it names none."""
    try:
        timeout_s = float(header or "")
    except ValueError:
        return None
    return timeout_s * _BUDGET_SHARE if math.isfinite(timeout_s) and timeout_s > 0 else None
