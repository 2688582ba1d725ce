"""Starts this command again where who is not root may make hosts: in a user namespace.

It has a network of its own, so this machine is not on it, and connections to ports of this machine
are passed on. Owns that passing. Different from a start by root: what is not passed on (Ray's head,
its dashboard) is reached from inside alone.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from deployments.simulation.hosts.namespaces import (
    can_join_machine,
    check_permitted,
    unshare,
)

# The sockets that the command inside was given, by their numbers.
LISTENERS_VARIABLE = "SLICEWISE_SIM_LISTENERS"
_BACKLOG = 512
_CHUNK_BYTES = 65536


def relaunch(addresses: Sequence[tuple[str, int]]) -> None:
    """Becomes the same command in a user namespace, that answers at these addresses out here.

    Returns where that is not needed, because the machine itself may join a network of hosts, and
    where this is the command inside.

    Raises:
        NotPermittedError: this system does not permit it either.
        OSError: an address is in use.
    """
    if is_inside() or can_join_machine():
        return
    check_permitted()
    command = unshare("--net", trial="ip link set lo up")
    listeners = [socket.create_server(address, backlog=_BACKLOG) for address in addresses]
    for listener in listeners:
        listener.set_inheritable(True)
    numbers = ",".join(str(listener.fileno()) for listener in listeners)
    again = [word for word in command if word != "--fork"] + ["--", sys.executable, *sys.argv]
    os.execvpe(again[0], again, os.environ | {LISTENERS_VARIABLE: numbers})


def is_inside() -> bool:
    """Returns whether this is the command that `relaunch` started."""
    return LISTENERS_VARIABLE in os.environ


def settle() -> None:
    """Passes on what comes to the addresses of `relaunch`, if this is the command inside."""
    if not is_inside():
        return
    numbers = os.environ[LISTENERS_VARIABLE]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    listeners = [socket.socket(fileno=int(number)) for number in numbers.split(",") if number]
    for listener in listeners:
        # What is started from here has no business with them.
        listener.set_inheritable(False)
    threading.Thread(
        target=asyncio.run, args=(_pass_on(listeners),), name="relay", daemon=True
    ).start()


async def _pass_on(listeners: Sequence[socket.socket]) -> None:
    servers = [await asyncio.start_server(_Relay(each), sock=each) for each in listeners]
    await asyncio.gather(*(server.serve_forever() for server in servers))


class _Relay:
    """Connects whoever comes with the same port inside."""

    def __init__(self, listener: socket.socket) -> None:
        self._address, self._port = listener.getsockname()[:2]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            # As if nobody listened here.
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pump(reader, inside_writer), _pump(inside_reader, writer))
        finally:
            for each in (writer, inside_writer):
                each.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
        return
    # Who was cut off at one end is cut off at the other.
    writer.transport.abort()
