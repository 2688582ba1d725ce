"""Listens for the connections of a link, plain or in TLS.

In TLS a connection is handed on once its handshake is done; what fails before is logged with the
reason, and a peer that speaks plainly is told so. At most `MAX_SHAKING` connections shake hands at
once; of more the oldest goes. Owns the listening socket and connections until they are handed on.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from serving.domain.limits import LinkEncryption, needs_tls
from serving.link.connection import (
    FAREWELL_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    LinkConnection,
    encode_frame,
)
from serving.link.gateway_connection import ConnectionConfig, ConnectionOwner, GatewayConnection
from serving.link.messages import Refused
from serving.link.tls import TlsEnd, TlsIdentity, TlsRole, tls_reason

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
MakeConnection = Callable[[TlsIdentity | None], LinkConnection]


class LinkListener:
    """Accepts connections on one address. Made and used inside one event loop."""

    def __init__(self, make: MakeConnection, tls: TlsEnd | None) -> None:
        """Accepts plain connections alone if `tls` is `None`, else encrypted ones alone."""
        self._make = make
        self._tls = tls
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
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)  # noqa: FBT003 - socket's own signature
        self._accepting = loop.create_task(self._accept(self._socket), name="accept-links")

    def close(self) -> None:
        """Stops listening, and drops what still shakes hands in TLS. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._accepting is not None:
            self._accepting.cancel()
        for task in self._shaking:
            task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
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
                    logger.warning("link not opened peer=%s reason=%s", host, PLAIN_TO_TLS)
                    # A few bytes into an empty buffer.
                    peer.send(encode_frame(Refused(PLAIN_TO_TLS)))
                    return
                (identity,) = self._tls.identities()
                is_handed_on = True
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make(identity),
                    peer,
                    ssl=identity.context,
                    ssl_shutdown_timeout=FAREWELL_TIMEOUT_S,
                )
        except TimeoutError:
            logger.warning(
                "link not opened peer=%s reason=TLS not finished in %s s", host, HANDSHAKE_TIMEOUT_S
            )
        except OSError as error:  # ssl.SSLError is one
            logger.warning("link not opened peer=%s reason=%s", host, tls_reason(error))
        finally:
            if not is_handed_on:
                peer.close()


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
    tls = None
    if needs_tls(encryption, host):
        tls = TlsEnd(config.secret, TlsRole.ENGINE, time.time)

    def make(identity: TlsIdentity | None) -> GatewayConnection:
        return GatewayConnection(owner, config, identity.certificate if identity else None)

    return LinkListener(make, tls)
