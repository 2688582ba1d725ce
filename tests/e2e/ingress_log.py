"""What HAProxy says of the requests that did not end as they should, and who ended them."""

import contextlib
import socket
import threading
from collections import deque

# "- -" are captured cookies, of which there are none; behind them is how the session ended, by
# HAProxy's manual: who (C: the client, S: the gateway), and at what.
_BEFORE_THE_END = " - - "
_WELL = "----"
_MOST = 50


class IngressLog:
    """Takes the log of an application's HAProxy at a port of its own, until it is closed."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._bad: deque[str] = deque(maxlen=_MOST)
        self._thread = threading.Thread(target=self._read, name="ingress log", daemon=True)
        self._thread.start()

    @property
    def target(self) -> str:
        """Where HAProxy is to send it."""
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        """Takes no more. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, though it says otherwise
        self._thread.join()
        self._socket.close()

    def bad_ends(self) -> list[str]:
        """The last lines of requests that somebody cut, or that were never whole."""
        return list(self._bad)

    def _read(self) -> None:
        while True:
            try:
                line = self._socket.recv(65_536)
            except OSError:
                return
            if not line:
                return
            text = line.decode(errors="replace").strip()
            _, found, end = text.partition(_BEFORE_THE_END)
            if found and not end.startswith(_WELL):
                self._bad.append(text)
