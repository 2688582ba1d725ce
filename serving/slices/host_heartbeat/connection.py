"""Connects the slice's replica to the agent of a host, which proves itself.

On any address but loopback both ends show certificates of the cluster secret (`link.tls`). Owns the
way to the stream, and the reasons for which there is none. Does not own what is said on it.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Coroutine
from typing import Any, TypeVar

from serving.link.heartbeat import HeartbeatConfig, Pulse
from serving.link.tls import ClientTls, tls_reason

_T = TypeVar("_T")

# How long one attempt to connect may take. The host's kernel answers it, not the agent.
CONNECT_S = 0.3


class LostError(Exception):
    """The host is lost, for the reason in the message; `is_silence`: it has fallen silent."""

    def __init__(self, reason: str, *, is_silence: bool = False) -> None:
        super().__init__(reason)
        self.is_silence = is_silence


async def connect_to_agent(
    address: tuple[str, int], tls: ClientTls, limit_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns the streams of a connection to the agent at `address`, which has proved itself.

    `limit_bytes` is the longest line. The proof takes as long as the agent needs: bound it.

    Raises:
        LostError: nobody is there, or somebody else.
    """
    identities = tls.identities_for(address[0])
    for identity in identities:
        connection = await _reach(address)
        try:
            return await asyncio.open_connection(
                sock=connection, limit=limit_bytes, **tls.options(identity)
            )
        except ssl.SSLCertVerificationError as error:
            if identity is identities[-1]:
                raise _unproven(error) from error
        except ssl.SSLError as error:
            raise _unproven(error) from error
        except OSError as error:
            raise _unreachable(error) from error
    raise AssertionError("a secret has a line at least")


async def unless_silent(pulse: Pulse, work: Coroutine[Any, Any, _T], complaint: str) -> _T:
    """Returns the result of `work`; raises `LostError` once `pulse` is silent for too long."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    try:
        while True:
            wait_s = max(0.0, pulse.due_at_s - loop.time())
            await asyncio.wait({task}, timeout=wait_s)
            if task.done():
                return task.result()
            if pulse.tick(loop.time()).is_peer_dead:
                raise LostError(complaint, is_silence=True)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _reach(address: tuple[str, int]) -> socket.socket:
    """Returns a connected socket, on which nothing was said."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    pulse = Pulse(HeartbeatConfig(CONNECT_S / 4, CONNECT_S), loop.time())
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.setblocking(False)  # noqa: FBT003 - socket's own signature
        connecting = _connected(connection, address)
        try:
            await unless_silent(pulse, connecting, "nobody answers at its address")
        except OSError as error:
            raise _unreachable(error) from error
        except LostError as error:
            # Its agent may have died alone: that is no silence of the host.
            raise LostError(str(error)) from error
        undo.pop_all()
        return connection


async def _connected(connection: socket.socket, address: tuple[str, int]) -> None:
    await asyncio.get_running_loop().sock_connect(connection, address)


def _unreachable(error: OSError) -> LostError:
    return LostError(f"its stream cannot be connected: {error}")


def _unproven(error: ssl.SSLError) -> LostError:
    return LostError(f"its agent cannot prove itself: {tls_reason(error)}")
