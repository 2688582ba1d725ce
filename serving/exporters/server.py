"""The exporter's HTTP side: two pages and a sign of life.

Owns the paths, and the budget that Prometheus grants a scrape. Does not own what the pages show.
"""

import http
import math
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

from prometheus_client import ProcessCollector

from serving.exporters.exposition import device_plugin_families, encode, families
from serving.exporters.scrape import Exporter

METRICS_PATH = "/metrics"
# Ray adds `/metrics` to what it is told in TPU_DEVICE_PLUGIN_ADDR.
DEVICE_PLUGIN_PATH = "/compat/gke-device-plugin/metrics"
HEALTH_PATH = "/healthz"

# Prometheus sends it with each scrape; the rest of that time is for the way.
_TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
_BUDGET_SHARE = 0.8
# A page takes milliseconds, so more than this at a time is a mistake or an attack.
_MAX_SCRAPES = 8
# Of a connection on which nothing comes.
_IDLE_S = 30.0


class ExporterServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves an exporter's pages; port 0 takes a free one (`server_address`).

    Beyond 8 scrapes at a time it answers 503. Collectors that fail do not show in the status: a
    page that is there with a reason on it is worth more than an error.

    Raises:
        OSError: the address cannot be listened on.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        self.exporter = exporter
        self.process = ProcessCollector(registry=None)
        self.places = threading.BoundedSemaphore(_MAX_SCRAPES)
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: ExporterServer

    def do_GET(self) -> None:
        """Answers one request."""
        path = self.path.partition("?")[0]
        if path == HEALTH_PATH:
            self._answer(http.HTTPStatus.OK, b"ok\n")
        elif path not in (METRICS_PATH, DEVICE_PLUGIN_PATH):
            known = f"{METRICS_PATH} {DEVICE_PLUGIN_PATH} {HEALTH_PATH}\n"
            self._answer(http.HTTPStatus.NOT_FOUND, known.encode())
        elif not self.server.places.acquire(blocking=False):
            self._answer(http.HTTPStatus.SERVICE_UNAVAILABLE, b"too many scrapes at a time\n")
        else:
            try:
                self._scrape(path)
            finally:
                self.server.places.release()

    def _scrape(self, path: str) -> None:
        exporter = self.server.exporter
        series = exporter.scrape(budget_s(self.headers.get(_TIMEOUT_HEADER)))
        if path == DEVICE_PLUGIN_PATH:
            page = device_plugin_families(series, exporter.facts.identity)
        else:
            page = [*families(series), *self.server.process.collect()]
        body, content_type = encode(page, self.headers.get("Accept", ""))
        self._answer(http.HTTPStatus.OK, body, content_type)

    def _answer(
        self, status: http.HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a line for each scrape is noise."""


def budget_s(header: str | None) -> float | None:
    """What a scrape may take by the asker's own timeout; `None` if it names none."""
    try:
        timeout_s = float(header or "")
    except ValueError:
        return None
    return timeout_s * _BUDGET_SHARE if math.isfinite(timeout_s) and timeout_s > 0 else None
