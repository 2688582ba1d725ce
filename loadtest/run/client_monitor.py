"""The client watches itself: how late its event loop wakes, its CPU, what it has in flight.

A run's numbers describe the server only as long as these stay small; the scorecard judges them.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import gevent

from loadtest.histogram import bucket_of
from loadtest.records import ClientSample

# A fast server's tokens come about this often; a loop that wakes late reads them late.
_PROBE_S = 0.005
_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """The totals of a worker since it began, and its requests in flight now."""

    in_flight: int
    num_sent: int
    num_token_events: int


class ClientMonitor:
    """Samples this process once a second until it is stopped.

    `start_s` is the monotonic instant of the run's start, `counts` returns what was done so far,
    `write` takes each sample.
    """

    def __init__(
        self,
        worker: int,
        start_s: float,
        counts: Callable[[], Counts],
        write: Callable[[ClientSample], None],
    ) -> None:
        self._worker = worker
        self._start_s = start_s
        self._counts = counts
        self._write = write
        self._lags: Counter[int] = Counter()
        self._longest_lag_s = 0.0
        self._greenlets = [gevent.spawn(self._probe), gevent.spawn(self._sample)]

    def stop(self) -> None:
        """Stops sampling. The second that is not over is left out."""
        gevent.killall(self._greenlets)

    def _probe(self) -> NoReturn:
        while True:
            asked_s = time.monotonic()
            gevent.sleep(_PROBE_S)
            lag_s = max(0.0, time.monotonic() - asked_s - _PROBE_S)
            self._lags[bucket_of(lag_s)] += 1
            self._longest_lag_s = max(self._longest_lag_s, lag_s)

    def _sample(self) -> NoReturn:
        at_s, cpu_s, counts = time.monotonic(), time.process_time(), self._counts()
        while True:
            gevent.sleep(_PERIOD_S)
            before_s, cpu_before_s, before = at_s, cpu_s, counts
            at_s, cpu_s, counts = time.monotonic(), time.process_time(), self._counts()
            self._write(
                ClientSample(
                    at_s=at_s - self._start_s,
                    worker=self._worker,
                    cpu_ratio=(cpu_s - cpu_before_s) / (at_s - before_s),
                    loop_lag_s=self._longest_lag_s,
                    loop_lag_counts=dict(self._lags),
                    in_flight=counts.in_flight,
                    num_sent=counts.num_sent - before.num_sent,
                    num_token_events=counts.num_token_events - before.num_token_events,
                )
            )
            self._lags.clear()
            self._longest_lag_s = 0.0
