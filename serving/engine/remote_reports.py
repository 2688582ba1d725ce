"""What workers on other hosts of an engine compile, told to its engine host.

They have no pipe to it (`report_pipe`), so they tell the engine core, which writes it down for
them. Without that the first long program of a later pipeline stage would look like a hang: the
processes on the first host wait for it. Owns the connection and who may use it. Does not own the
words (`worker_reports`).
"""

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from serving.engine.worker_reports import LineReader, report_for

logger = logging.getLogger(__name__)

# A worker tells nothing rather than keep a step waiting.
_SEND_S = 1.0
_MAX_LINE_BYTES = 512


class RelayAddress(NamedTuple):
    """Where reports go, and what shows that whoever sends them is of the engine."""

    host: str
    port: int
    token: str


class ReportRelay:
    """The engine core's end. It listens until it is closed, or its process ends."""

    def __init__(self, host: str) -> None:
        """Listens at this address of the host.

        Raises:
            OSError: it is none of the host's.
        """
        self._server = socket.create_server((host, 0))
        self.address = RelayAddress(host, self._server.getsockname()[1], secrets.token_hex(16))
        threading.Thread(target=self._accept, name="report-relay", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections. Those that there are go on until their worker ends."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._server.accept()
            except OSError:  # closed
                return
            name = f"{peer[0]}:{peer[1]}"
            threading.Thread(
                target=self._relay, args=(connection, name), name="report-relay", daemon=True
            ).start()

    def _relay(self, connection: socket.socket, name: str) -> None:
        """Hands on what one worker reports, and takes back what it leaves undone."""
        reader = LineReader(name)
        with connection, suppress(OSError), connection.makefile("rb") as lines:
            first = lines.readline(_MAX_LINE_BYTES).strip()
            if not hmac.compare_digest(first, self.address.token.encode()):
                logger.warning("report_refused peer=%s", name)
                return
            while line := lines.readline(_MAX_LINE_BYTES):
                reader.take(line.decode("ascii", "replace").strip())
        reader.end()


def report_to(address: RelayAddress) -> Callable[[], None] | None:
    """Sends what this process compiles from now on to another host.

    Returns what ends that; `None` if nobody is reached, which is logged: no work may fail of it.
    """
    try:
        connection = socket.create_connection((address.host, address.port), _SEND_S)
    except OSError as error:
        logger.warning("reports_not_sent to=%s:%d reason=%r", *address[:2], str(error))
        return None

    def send(line: str) -> None:
        written = line.encode("ascii", "replace").replace(b"\n", b" ")[: _MAX_LINE_BYTES - 1]
        # The host then takes it for a hang, which it is if the network is gone.
        with suppress(OSError):
            connection.sendall(written + b"\n")

    def end() -> None:
        report_for(None)
        connection.close()

    send(address.token)
    report_for(send)
    return end
