"""Listens for the connections of a link or of a host's stream, plain or in TLS.

In TLS a connection is handed on once its handshake is done and the peer's certificate is of the
role that opens such connections. What fails before is logged with the reason, and a peer that
speaks plainly may be told so. At most `MAX_SHAKING` connections shake hands at once; of more the
oldest goes. Owns the listening socket and connections until they are handed on.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from serving.domain.limits import LinkEncryption
from serving.link.connection import (
    FAREWELL_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    encode_frame,
)
from serving.link.gateway_connection import ConnectionConfig, ConnectionOwner, GatewayConnection
from serving.link.messages import Refused
from serving.link.tls import (
    TlsEnd,
    TlsIdentity,
    TlsRole,
    accepting_end,
    names_of_peer,
    tls_reason,
)

logger = logging.getLogger(__name__)

MAX_SHAKING = 256
_BACKLOG = 128
# Between two attempts to accept, while the process has no descriptor left.
_RETRY_S = 0.1
# The first byte of every TLS connection. That of a frame is 0, because handshakes are short.
_TLS_HANDSHAKE = 0x16

PLAIN_TO_TLS = (
    "this link is encrypted and the peer's is not: both ends need the same link.encryption"
)

# Makes the receiver of one connection; the argument is this end's identity on it, `None` if plain.
MakeConnection = Callable[[TlsIdentity | None], asyncio.Protocol]


class LinkListener:
    """Accepts connections on one address. Made and used inside one event loop."""

    def __init__(
        self, make: MakeConnection, tls: TlsEnd | None, what: str = "link", farewell: bytes = b""
    ) -> None:
        """Accepts plain connections alone if `tls` is `None`, else encrypted ones alone.

        `what` is the name of a connection in the log. `farewell` is what a peer is told that speaks
        plainly where it must not.
        """
        self._make = make
        self._tls = tls
        self._what = what
        self._farewell = farewell
        self._server: asyncio.Server | None = None
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._shaking: dict[asyncio.Task[None], None] = {}  # oldest first

    @property
    def address(self) -> tuple[str, int]:
        """The host and port; a port of 0 has become the chosen one."""
        bound = self._socket if self._server is None else self._server.sockets[0]
        assert bound is not None, "listen first"
        host, port = bound.getsockname()[:2]
        return host, port

    async def listen(self, host: str, port: int) -> None:
        """Accepts from now on. Raises `OSError` when the address is taken."""
        loop = asyncio.get_running_loop()
        if self._tls is None:
            self._server = await loop.create_server(lambda: self._make(None), host, port)
            return
        self._tls.identities()  # a secret that cannot be used fails here
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listening.setblocking(False)  # noqa: FBT003 - socket's own signature
        self._socket = listening
        self._accepting = loop.create_task(self._accept(listening), name="accept-links")
        # Here, for a task that is cancelled before it runs as well.
        self._accepting.add_done_callback(lambda _: listening.close())

    def close(self) -> None:
        """Stops listening, and drops what still shakes hands in TLS. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._accepting is not None:
            self._accepting.cancel()
        for task in self._shaking:
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits, after `close`, until the address is free."""
        if self._server is not None:
            await self._server.wait_closed()
        if self._accepting is not None:
            await asyncio.gather(self._accepting, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, address = await loop.sock_accept(listening)
            except OSError as error:
                logger.warning("link_accept_failed error=%r", str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._shaking) >= MAX_SHAKING:
                next(iter(self._shaking)).cancel()
            task = loop.create_task(self._shake(peer, address[0]), name="shake-tls")
            self._shaking[task] = None
            task.add_done_callback(lambda done: self._shaking.pop(done, None))

    async def _shake(self, peer: socket.socket, host: str) -> None:
        """Shakes hands in TLS and hands the connection on; ends it with a reason if that fails."""
        assert self._tls is not None
        peer.setblocking(False)  # noqa: FBT003 - socket's own signature
        is_handed_on = False
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                if not await _speaks_tls(peer):
                    self._note_refusal(host, PLAIN_TO_TLS)
                    # A few bytes into an empty buffer.
                    peer.send(self._farewell)
                    return
                (identity,) = self._tls.identities()
                is_handed_on = True
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: _RoleGate(partial(self._receiver, identity, host)),
                    peer,
                    ssl=identity.context,
                    ssl_shutdown_timeout=FAREWELL_TIMEOUT_S,
                )
        except TimeoutError:
            self._note_refusal(host, f"TLS not finished in {HANDSHAKE_TIMEOUT_S} s")
        except OSError as error:  # ssl.SSLError is one
            self._note_refusal(host, tls_reason(error))
        finally:
            if not is_handed_on:
                peer.close()

    def _receiver(
        self, identity: TlsIdentity, host: str, names: tuple[str, ...]
    ) -> asyncio.Protocol | None:
        """Returns what receives from a peer that has proved `names`; `None`: it has no business."""
        assert self._tls is not None
        wanted = self._tls.role.peer
        if wanted in names:
            return self._make(identity)
        self._note_refusal(host, f"the peer is {', '.join(names)}, and not {wanted}")
        return None

    def _note_refusal(self, host: str, reason: str) -> None:
        logger.warning("%s not opened peer=%s reason=%s", self._what, host, reason)


class _RoleGate(asyncio.Protocol):
    """Holds a connection until its peer's certificate has been read, which is before its data."""

    def __init__(self, receiver_for: Callable[[tuple[str, ...]], asyncio.Protocol | None]) -> None:
        self._receiver_for = receiver_for

    def connection_made(self, transport: Any) -> None:  # uvloop's are no subclass of asyncio's
        receiver = self._receiver_for(names_of_peer(transport.get_extra_info("ssl_object")))
        if receiver is None:
            transport.abort()
            return
        transport.set_protocol(receiver)
        receiver.connection_made(transport)


async def _speaks_tls(peer: socket.socket) -> bool:
    """Waits for the first byte of a connection, leaves it unread, and returns whether it is TLS."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(peer, note)
    try:
        await readable
    finally:
        loop.remove_reader(peer)
    first = peer.recv(1, socket.MSG_PEEK)
    if not first:
        raise ConnectionResetError("the peer closed the connection")
    return first[0] == _TLS_HANDSHAKE


def engine_listener(
    owner: ConnectionOwner, config: ConnectionConfig, encryption: LinkEncryption, host: str
) -> LinkListener:
    """Returns the listener of an engine host's port on `host`, encrypted where that is needed."""
    tls = accepting_end(config.secret, encryption, TlsRole.ENGINE, host)

    def make(identity: TlsIdentity | None) -> GatewayConnection:
        return GatewayConnection(owner, config, identity.certificate if identity else None)

    return LinkListener(make, tls, farewell=encode_frame(Refused(PLAIN_TO_TLS)))
