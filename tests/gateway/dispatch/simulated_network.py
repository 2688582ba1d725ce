"""An event loop with a network of its own: on a clock that jumps, and every byte takes as long.

What listens and connects by `create_server` and `create_connection` on it needs no change, so that
gateways and engines run here as they are, by their codecs and heartbeats, hours in seconds.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.engine.simulated_time import SimulatedLoop

# From one host to another in a zone, one way.
LATENCY_S = 0.000_25


class _Transport(asyncio.Transport):
    """One end of a connection. Takes everything at once."""

    def __init__(self, loop: "NetworkLoop", protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.protocol: Any = protocol
        self.peer: _Transport
        self._loop = loop
        self._under_way: deque[bytes | None] = deque()
        self._is_closing = False

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._send(bytes(data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self._loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered."""

    def _send(self, data: bytes | None) -> None:
        # Timers of one instant need not run in their order, so each takes what is first.
        self._under_way.append(data)
        self._loop.call_later(self._loop.latency_s, self._arrive)

    def _arrive(self) -> None:
        data = self._under_way.popleft()
        if self.peer.is_closing():
            return
        if data is None:
            self.peer.close()
        else:
            self.peer.protocol.data_received(data)


class _Socket:
    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address


class _Server:
    def __init__(self, loop: "NetworkLoop", address: tuple[str, int]) -> None:
        self.sockets = [_Socket(address)]
        self._loop, self._address = loop, address

    def close(self) -> None:
        self._loop.listening.pop(self._address, None)

    async def wait_closed(self) -> None:
        """It is closed at once."""


class NetworkLoop(SimulatedLoop):
    """The loop of everything in one world."""

    def __init__(self, latency_s: float = LATENCY_S) -> None:
        super().__init__()
        self.latency_s = latency_s
        self.listening: dict[tuple[str, int], Callable[[], asyncio.BaseProtocol]] = {}
        self._num_ports = 0

    # `Any`: the signatures of asyncio's loop, of which the link uses this much.
    async def create_server(self, protocol_factory: Any, host: Any, port: Any, **_: Any) -> Any:
        self._num_ports += 1
        address = host, port or self._num_ports
        self.listening[address] = protocol_factory
        return _Server(self, address)

    async def create_connection(self, protocol_factory: Any, host: Any, port: Any, **_: Any) -> Any:
        await asyncio.sleep(2 * self.latency_s)
        accept = self.listening.get((host, port))
        if accept is None:
            raise ConnectionRefusedError(f"nobody listens on {host}:{port}")
        here, there = (_Transport(self, factory()) for factory in (protocol_factory, accept))
        here.peer, there.peer = there, here
        there.protocol.connection_made(there)
        here.protocol.connection_made(here)
        return here, here.protocol


def run_on_network(main: Coroutine[Any, Any, None], latency_s: float = LATENCY_S) -> None:
    """Runs `main` to its end on a clock that starts at 0 s."""
    with asyncio.Runner(loop_factory=lambda: NetworkLoop(latency_s)) as runner:
        runner.run(main)
