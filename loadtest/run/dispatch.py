"""Decides when requests are sent: on schedule at any server speed, or by users who wait.

Owns the instants, the sharing of a schedule among workers and the end of a run. Does not own what a
request is (`sender`). Runs in greenlets; all instants are monotonic seconds.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import gevent
from gevent.pool import Pool

from loadtest.client.body import Conversation
from loadtest.client.http_client import OutgoingRequest
from loadtest.planned_request import PlannedRequest

# A user whose request failed waits so long at least: a server that is gone is not to be hammered.
_PAUSE_S = 1.0
_TURN_OF_THE_LOOP_S = 0.001

Turns = tuple[PlannedRequest, ...]


class Sends(Protocol):
    """Sends what is due."""

    def prepare(
        self, planned_request: PlannedRequest, so_far: Conversation | None
    ) -> OutgoingRequest:
        """Makes the request ready, ahead of its instant."""

    def send(
        self,
        planned_request: PlannedRequest,
        request: OutgoingRequest,
        due_s: float,
        so_far: Conversation | None,
    ) -> float | None:
        """Sends it; returns when its answer was over, `None` if there was no whole one."""


def conversations(requests: Sequence[PlannedRequest]) -> list[Turns]:
    """The requests of each session in order, one on its own as a session of one turn."""
    by_session: dict[str, list[PlannedRequest]] = {}
    for planned_request in requests:
        # A space keeps the two kinds of names apart: ids of single requests never meet a session's.
        key = planned_request.session_id or f" {planned_request.request_id}"
        by_session.setdefault(key, []).append(planned_request)
    return [tuple(turns) for turns in by_session.values()]


def share_of(turns: Sequence[Turns], worker: int, num_workers: int) -> list[Turns]:
    """Returns a worker's share. A session stays with one worker: its next turn needs the last."""
    return list(turns[worker::num_workers])


class OpenLoop:
    """Sends each first turn at its instant and waits for no answer; later turns when they are due.

    A later turn is due its think time after the answer to the turn before; a turn that becomes due
    at `end_s` or later, or follows a failed one, is not sent.
    """

    def __init__(self, share: Sequence[Turns], sends: Sends, start_s: float, end_s: float) -> None:
        self._share = share
        self._sends = sends
        self._start_s = start_s
        self._end_s = end_s
        self._open = Pool()

    def run(self) -> None:
        """Sends every first turn at its instant; returns when the last one was sent."""
        for turns in self._share:
            first = turns[0]
            assert first.offset_s is not None, "a first turn of a schedule has an instant"
            so_far = _new_conversation(first)
            # While there is time: a long prompt takes milliseconds to make.
            request = self._sends.prepare(first, so_far)
            due_s = self._start_s + first.offset_s
            _sleep_until(due_s)
            self._open.spawn(self._converse, turns, request, due_s, so_far)

    def drain(self, until_s: float) -> None:
        """Waits for what is in flight, then ends it: what is left is recorded as unfinished."""
        _drain(self._open, until_s)

    def _converse(
        self, turns: Turns, request: OutgoingRequest, due_s: float, so_far: Conversation | None
    ) -> None:
        ended_s = self._sends.send(turns[0], request, due_s, so_far)
        for planned_request in turns[1:]:
            if ended_s is None or (due_s := ended_s + planned_request.think_time_s) >= self._end_s:
                return
            request = self._sends.prepare(planned_request, so_far)
            _sleep_until(due_s)
            ended_s = self._sends.send(planned_request, request, due_s, so_far)


class ClosedLoop:
    """Runs users with one request at a time each, who take session after session.

    A request is due its think time after the one before it was over, and is not sent if that is at
    `end_s` or later. Users begin at `begins_s`, one each.
    """

    def __init__(
        self, sessions: Iterator[Turns], sends: Sends, begins_s: Sequence[float], end_s: float
    ) -> None:
        self._sessions = sessions
        self._sends = sends
        self._begins_s = begins_s
        self._end_s = end_s
        self._users = Pool()

    def run(self) -> None:
        """Runs the users until `end_s`, or until none will send any more."""
        for begin_s in self._begins_s:
            self._users.spawn(self._use, begin_s)
        self._users.join(timeout=max(0.0, self._end_s - time.monotonic()))

    def drain(self, until_s: float) -> None:
        """Waits for what is in flight, then ends it: what is left is recorded as unfinished."""
        _drain(self._users, until_s)

    def _use(self, free_s: float) -> None:
        # A user begins without thinking, and pauses after a failure.
        pause_s: float | None = 0.0
        for turns in self._sessions:
            so_far = _new_conversation(turns[0])
            for planned_request in turns:
                due_s = free_s + (planned_request.think_time_s if pause_s is None else pause_s)
                if due_s >= self._end_s:
                    return
                request = self._sends.prepare(planned_request, so_far)
                _sleep_until(due_s)
                ended_s = self._sends.send(planned_request, request, due_s, so_far)
                free_s = time.monotonic()
                pause_s = max(planned_request.think_time_s, _PAUSE_S) if ended_s is None else None
                if ended_s is None:
                    break  # the next turn would lack this one's answer


def user_begins_s(
    num_users: int, worker: int, num_workers: int, start_s: float, ramp_s: float
) -> list[float]:
    """Returns when a worker's share of all users begins: evenly over `ramp_s`.

    If all began at once, they would wait for each other's prompts, and again at every answer's end.
    """
    users = range(worker, num_users, num_workers)
    return [start_s + ramp_s * user / num_users for user in users]


def _new_conversation(first: PlannedRequest) -> Conversation | None:
    return None if first.session_id is None else Conversation()


def _drain(pool: Pool, until_s: float) -> None:
    # Never 0: a request that was spawned just now is to be sent and recorded, not to vanish.
    pool.join(timeout=max(_TURN_OF_THE_LOOP_S, until_s - time.monotonic()))
    pool.kill()


def _sleep_until(due_s: float) -> None:
    # The loop's timer may fire a little early.
    while (wait_s := due_s - time.monotonic()) > 0:
        gevent.sleep(wait_s)
