"""A port at which one gateway answers `/metrics` for itself.

Through Serve's proxy any gateway answers, so no reader can tell that one is gone. Serve gives each
gateway a port too, but another one at every restart, and keeps the old one back for two hours: who
reads the first few would soon read none. Here a port is free again as soon as its process ended.

Owns the port and what may be asked there: nothing but the page, by the edge's own rules.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

METRICS_ROUTE = "/metrics"


class OwnListener:
    """Serves the page of `edge` at the first of `ports` that is free. Start once, close once."""

    def __init__(self, edge: ASGIApp, host: str, ports: Sequence[int]) -> None:
        self._edge = edge
        self._host = host
        self._ports = ports
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port: int | None = None

    def start(self) -> None:
        """Begins to answer. Where no port is free it says so, and the gateway goes on without."""
        if not self._ports:
            return
        taken = _first_free(self._host, self._ports)
        if taken is None:
            logger.warning("metrics_port_missing taken=%r", list(self._ports))
            return
        self.port = taken.getsockname()[1]
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            ws="none",
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([taken]), name="metrics page")
        logger.info("metrics_port port=%d", self.port)

    async def close(self) -> None:
        """Stops answering; the port is free afterwards."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._serving

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == METRICS_ROUTE:
            await self._edge(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse(f"only {METRICS_ROUTE}\n", 404)(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves the process's signals to Ray, whose process it is."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _first_free(host: str, ports: Sequence[int]) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        found = socket.socket(family, socket.SOCK_STREAM)
        # Connections of the gateway before, which has ended, do not keep its port.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen()
        except OSError:
            found.close()
        else:
            return found
    return None
