"""Reads the libtpu SDK rarely, in a child process, for what only the node's agent knows.

Owns the child's life, its timeout and the age of its last sample. Does not own what the values mean
(`host_decode`). This source is off by default: on GKE, frequent reads of these values have crashed
the node's agent, so the interval has a floor, and a scrape never causes a read.
"""

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.exporters.collector import Code, CollectError, SdkValues
from serving.exporters.host_decode import SDK_METRICS

# Google advises against more (GKE troubleshooting of the vbar agent, read 2026-11-21).
MIN_INTERVAL_S = 60.0
_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 300.0
# A first read loads the library, which has taken 0.2 s; without the variable below, minutes.
_POLL_TIMEOUT_S = 20.0
# A sample is served for this many intervals, with its age beside it.
_SERVED_INTERVALS = 2
_CHUNK_BYTES = 1 << 16
_MARK = b"@"


def sdk_command(python: str) -> tuple[str, ...]:
    """Returns the child's command line; `python` is an interpreter that has libtpu."""
    program = Path(__file__).with_name("sdk_child.py")
    # -P: the program's folder is this package's, and none of its modules may hide a library's.
    return (python, "-u", "-P", f"{program}", *SDK_METRICS)


class SdkChild:
    """The child process: started when first asked, killed when it does not answer in time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, timeout_s: float) -> dict[str, tuple[str, ...]]:
        """Returns the present values of the SDK, by its own names.

        Raises:
            CollectError: it crashed, hung or printed nonsense. It has been killed, and the next
                call starts another.
        """
        try:
            line = self._answer(time.monotonic() + timeout_s)
            return {name: tuple(texts) for name, texts in json.loads(line).items()}
        except CollectError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise CollectError(Code.CRASHED, f"{error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            self.close()
            raise CollectError(Code.UNREADABLE, f"{error!r}") from error

    def close(self) -> None:
        """Ends the child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _answer(self, deadline_s: float) -> bytes:
        """Returns the next line behind the mark."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        output = process.stdout.fileno()
        received = b""
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not select.select([output], [], [], left_s)[0]:
                continue
            chunk = os.read(output, _CHUNK_BYTES)
            if not chunk:
                raise CollectError(Code.CRASHED, f"it ended with status {process.wait()}")
            received += chunk
            for line in received.split(b"\n")[:-1]:
                if line.startswith(_MARK):
                    return line.removeprefix(_MARK)
        raise CollectError(Code.DEADLINE_EXCEEDED, "the SDK does not return")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Off Google Cloud the library would ask the metadata server for minutes.
                env={**os.environ, "TPU_SKIP_MDS_QUERY": "1"},
            )
        return self._process


class SdkCollector:
    """Polls a child at an interval, and serves its last sample, with its age, between two polls."""

    name = "sdk"
    target = ""

    def __init__(
        self,
        child: SdkChild,
        interval_s: float = MIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval_s < MIN_INTERVAL_S:
            raise ValueError(f"the SDK is polled every {MIN_INTERVAL_S:g} s at most")
        self._child = child
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._sample: tuple[float, dict[str, tuple[str, ...]]] | None = None
        self._failure: CollectError | None = None
        self._num_failures = 0
        self._is_over = threading.Event()

    def poll(self) -> float:
        """Asks the child once; returns the seconds to wait before the next time."""
        try:
            values = self._child.ask(_POLL_TIMEOUT_S)
        except CollectError as error:
            with self._lock:
                self._failure = error
                wait_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**self._num_failures)
                self._num_failures = min(self._num_failures + 1, 16)
                return wait_s
        with self._lock:
            self._sample, self._failure, self._num_failures = (self._clock(), values), None, 0
        return self._interval_s

    def collect(self, timeout_s: float) -> SdkValues | None:  # noqa: ARG002 - it does not wait
        """Returns the last sample, `None` before the first poll is over.

        Raises:
            CollectError: there is none that is young enough, for the reason of the last poll.
        """
        with self._lock:
            if self._sample is not None:
                sampled_at_s, values = self._sample
                age_s = self._clock() - sampled_at_s
                if age_s < _SERVED_INTERVALS * self._interval_s:
                    return SdkValues(values=values, age_s=age_s)
            if self._failure is not None:
                raise self._failure
            return None

    def run(self) -> None:
        """Polls until `close`; for a thread of its own."""
        while not self._is_over.wait(self.poll()):
            pass
        self._child.close()

    def close(self) -> None:
        """Lets `run` end with the poll that is under way."""
        self._is_over.set()
