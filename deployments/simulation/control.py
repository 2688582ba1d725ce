"""Controls a running simulated cluster for a user: a small HTTP API on a Unix socket.

The socket lies in a folder of this user alone, so no other user's commands reach it.
"""

import asyncio
import contextlib
import inspect
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

# The methods of a cluster that a command may name.
_COMMANDS = frozenset(
    {
        "add", "preempt", "maintain", "drain", "kill", "slow", "partition", "stock_out", "describe",
        "add_host", "kill_host",
    }
)  # fmt: skip
# Those of its control plane.
_CONTROL_PLANE_COMMANDS = frozenset({"kill_head", "start_head", "kill_redis", "start_redis"})
_TIMEOUT_S = 120.0


class ControlError(RuntimeError):
    """The simulated cluster is not there, or refuses the command. The message names why."""


def default_socket() -> Path:
    """Returns where a user's simulated cluster listens by default."""
    return Path(tempfile.gettempdir()) / f"slicewise-sim-{os.getuid()}" / "control.sock"


class ControlServer:
    """Carries out commands one at a time, in a thread of its own. A context manager."""

    # The cluster is any object with these methods: commands name them, JSON carries the arguments.
    def __init__(self, cluster: Any, socket: Path) -> None:
        self._cluster = cluster
        self._socket = socket
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="simulation-control", daemon=True)
        self._listening = threading.Event()

    def __enter__(self) -> "ControlServer":
        """Raises `ControlError` where another cluster of this user listens already."""
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._socket.parent.stat().st_uid != os.getuid():
            raise ControlError(f"{self._socket.parent} belongs to another user")
        if self._socket.exists() and _answers(self._socket):
            raise ControlError(f"another simulated cluster listens on {self._socket}")
        self._socket.unlink(missing_ok=True)
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies in it
            self._socket.parent.rmdir()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.router.add_post("/{command}", self._answer)
        runner = web.AppRunner(application)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.UnixSite(runner, str(self._socket)).start())
        self._listening.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.match_info["command"]
        if name in _CONTROL_PLANE_COMMANDS:
            command = getattr(self._cluster.control_plane, name)
        elif name in _COMMANDS:
            command = getattr(self._cluster, name)
        else:
            return web.json_response({"error": f"unknown command {name!r}"}, status=404)
        arguments = await request.json()
        try:
            inspect.signature(command).bind(**arguments)
            result = await asyncio.to_thread(command, **arguments)
        # The ways in which a cluster refuses: `UnknownSliceError` is a `ValueError`.
        except (TypeError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"result": result})


def call(socket: Path, command: str, **arguments: Any) -> Any:
    """Has a running simulated cluster carry out a command, and returns its result.

    Raises:
        ControlError: nothing listens there, or the command is refused.
    """
    return asyncio.run(_call(socket, command, arguments))


async def _call(socket: Path, command: str, arguments: Mapping[str, Any]) -> Any:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.UnixConnector(path=str(socket))
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:
            async with session.post(f"http://simulation/{command}", json=arguments) as response:
                answer = await response.json()
        except (aiohttp.ClientError, OSError) as error:
            message = f"no simulated cluster listens on {socket}; start one with `slicewise sim up`"
            raise ControlError(message) from error
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return answer["result"]


def _answers(socket: Path) -> bool:
    try:
        call(socket, "describe")
    except ControlError:
        return False
    return True
