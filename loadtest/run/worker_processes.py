"""The worker processes of a run as their parent holds them: started, sent messages, read, ended.

Each is a headless Locust in a session of its own, so that Ctrl-C reaches the parent only, which
then ends the run in order. Does not own what a worker does (`worker`).
"""

import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.run.control import FromParent, FromWorker, encode_message, from_worker

_LOCUSTFILE = Path(__file__).with_name("worker_locustfile.py")
_SHOWN_LOG = 2_000  # characters of a failed worker's log
_READ_SIZE = 1 << 16
_END_PATIENCE_S = 10.0


@dataclass(slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    log: Path
    unread: bytes = field(default=b"")


class WorkerProcesses:
    """Owns all workers of one run. `close` leaves none behind."""

    def __init__(self, out_dir: Path, num_workers: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, _Worker] = {}
        self._ended: list[_Worker] = []
        for number in range(num_workers):
            worker = _started(out_dir, number)
            self._open[number] = worker
            self._selector.register(worker.control, selectors.EVENT_READ, worker)

    @property
    def num_open(self) -> int:
        """The number of workers with an open connection."""
        return len(self._open)

    def send(self, message: FromParent) -> None:
        """Sends to every worker that is still there."""
        line = encode_message(message)
        for worker in self._open.values():
            try:
                worker.control.sendall(line)
            except OSError:
                continue  # it is ending; `receive` will report it

    def receive(self, timeout_s: float) -> Iterator[tuple[int, FromWorker]]:
        """Yields messages within `timeout_s`, by worker; a worker that hangs up has ended."""
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            try:
                data = worker.control.recv(_READ_SIZE)
            except ConnectionError:
                data = b""
            if not data:
                self._selector.unregister(worker.control)
                self._ended.append(self._open.pop(worker.number))
                continue
            *lines, worker.unread = (worker.unread + data).split(b"\n")
            for line in lines:
                yield worker.number, from_worker(line)

    def close(self) -> list[str]:
        """Ends what is left and reports why each failed worker failed, with the end of its log."""
        failures = []
        # Of those that hung up, an exit in order is near; the others had their time.
        for worker in self._open.values():
            worker.process.kill()
        for worker in [*self._ended, *self._open.values()]:
            try:
                code = worker.process.wait(_END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                code = worker.process.wait()
            worker.control.close()
            if code:
                shown = worker.log.read_text("utf-8", "replace")[-_SHOWN_LOG:].strip()
                failures.append(f"worker {worker.number} ended with {code}: {shown}")
            else:
                worker.log.unlink()
        self._selector.close()
        return failures


def _started(out_dir: Path, number: int) -> _Worker:
    ours, theirs = socket.socketpair()
    log = out_dir / f"worker-{number}.log"
    command = [
        *(sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--only-summary"),
        *("--users", "1", "--run-dir", str(out_dir), "--run-worker", str(number)),
        *("--control-fd", str(theirs.fileno())),
    ]
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return _Worker(number, process, ours, log)
