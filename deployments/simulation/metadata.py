"""The metadata servers of all simulated hosts: one thread, one event loop, one port a host."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from deployments.simulation.metadata_server import SimulatedMetadata
from serving.slices.metadata_client import HOST_VARIABLE
from serving.slices.probe import SIMULATED_VARIABLE

_TIMEOUT_S = 10.0


class MetadataServers:
    """Starts and ends the servers, which listen on `address`. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="simulated-metadata", daemon=True
        )
        self._thread.start()

    def start(self) -> "HostMetadata":
        """Starts a server for one more host."""
        server = SimulatedMetadata()
        _wait(server.start(self._address), self._loop)
        return HostMetadata(server, self._loop)

    def close(self) -> None:
        """Ends the thread; the servers have been closed by their owners."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()


class HostMetadata:
    """Controls the metadata server of one simulated host from other threads."""

    def __init__(self, server: SimulatedMetadata, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop

    @property
    def environment(self) -> dict[str, str]:
        """Returns what the host's processes have to find in their environment."""
        return {HOST_VARIABLE: self._server.host, SIMULATED_VARIABLE: "1"}

    def announce_preemption(self) -> None:
        """Announces that the host is being preempted."""
        self._loop.call_soon_threadsafe(self._server.announce_preemption)

    def announce_maintenance(self, at_s: float) -> None:
        """Announces that maintenance ends the host at this wall-clock time."""
        self._loop.call_soon_threadsafe(self._server.announce_maintenance, at_s)

    def close(self) -> None:
        """Ends the server."""
        _wait(self._server.close(), self._loop)


def _wait(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    asyncio.run_coroutine_threadsafe(work, loop).result(_TIMEOUT_S)
