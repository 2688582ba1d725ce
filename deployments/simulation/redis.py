"""Runs the Redis server of a simulated cluster, which keeps the state outside the head.

Owns one process of Debian's `redis-server`, its port and its folder. Every write is in its
append-only file before it is answered, as a Redis for this purpose has to be set.
"""

import shutil
import socket
import subprocess
import time
from pathlib import Path

_START_TIMEOUT_S = 20.0
_POLL_S = 0.02
_ANSWER_BYTES = 16_384


class RedisUnavailableError(RuntimeError):
    """Reports that `redis-server` is missing or does not start. The message names what to do."""


class RedisServer:
    """Starts, kills and restarts Redis on one port of the loopback. A context manager."""

    def __init__(self, folder: Path, port: int) -> None:
        """Takes a `folder` of its own: `lose` empties it."""
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """Returns what `RAY_REDIS_ADDRESS` has to be."""
        return f"127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        """Returns whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it with what was written before, and waits until it answers; a no-op if it runs.

        Raises:
            RedisUnavailableError: it is not installed or does not answer.
        """
        if self.is_running:
            return
        binary = shutil.which("redis-server")
        if binary is None:
            raise RedisUnavailableError("no redis-server on PATH; Debian: apt install redis-server")
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    binary, "--bind", "127.0.0.1", "--port", str(self._port),
                    "--dir", str(self._folder), "--save", "",
                    "--appendonly", "yes", "--appendfsync", "always",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the command, which ends it in its turn.
                start_new_session=True,
            )  # fmt: skip
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if not self.is_running or time.monotonic() > deadline_s:
                self.kill()
                said = (self._folder / "redis.log").read_text(errors="replace").splitlines()
                raise RedisUnavailableError("redis-server: " + " | ".join(said[-3:]))
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Ends it at once, as if its machine were gone; its file stays. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def lose(self) -> None:
        """Ends it together with all that it has kept."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        """Returns whether our process, and no other on this port, has read its file and answers."""
        if self._process is None:
            return False
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
                # While it reads its file the answer to the first is -LOADING.
                connection.sendall(b"PING\r\nINFO server\r\n")
                answer = b""
                while answer.startswith(b"+PONG"[: len(answer)]) and b"process_id:" not in answer:
                    more = connection.recv(_ANSWER_BYTES)
                    if not more:
                        return False
                    answer += more
        except OSError:
            return False
        ours = f"process_id:{self._process.pid}\r\n".encode()
        return answer.startswith(b"+PONG") and ours in answer
