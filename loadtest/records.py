"""Defines the records of a run: one per request, samples of the client and the fleet, events.

They are the seam between the client, which writes these as they happen, and the scorecard, which
reads nothing else. Each is one line of JSON with its kind under `kind`. Times are seconds after the
start of the run on one monotonic clock, unless a name states otherwise; `RunStart.at_unix_s` ties
that clock to the wall.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec


class RunStart(msgspec.Struct, frozen=True, tag="run_start", tag_field="kind"):
    """The first record of a run. `plan` is the run's whole plan as plain JSON.

    `duration_s` is how long requests were scheduled for; those before `warmup_s` are sent and
    recorded but not judged. `num_scheduled` is how many requests with an instant of their own the
    schedule had until the run was over, so that those without a record are known to be missing;
    later turns of sessions (`turn` above 0) come on top of it. `None` for a closed loop.
    """

    at_unix_s: float
    url: str
    duration_s: float
    warmup_s: float
    num_workers: int
    seed: int
    num_scheduled: int | None
    plan: dict[str, object]


class RequestRecord(msgspec.Struct, frozen=True, tag="request", tag_field="kind"):
    """The record of one request that ended, well or not.

    `scheduled_s` is the instant it was to be sent at (for a dependent one, the instant at which it
    became due), `sent_s` when it was, the first time if it was tried again. `first_s` and `last_s`
    are its first and last token event, `None` without one; `ended_s` when the client was done with
    it. `planned_input_tokens` is the whole prompt, earlier turns of its session included. `error`
    is `None` for a success, otherwise the kind of failure, one of `loadtest.errors.ErrorKind`;
    `detail` is for a reader. `http_status` is `None` when no response came. `attempts` counts
    sends, 1 without a retry. `input_tokens`, `output_tokens` and `cached_tokens` are the server's
    `usage`, `None` where it reported none; `num_chunks` counts events that carried tokens.
    `gap_counts` is the histogram of the gaps between those events: bucket of `loadtest.histogram`
    to count. `longest_gap_s` and the instant its gap began at, `longest_gap_at_s`, are `None` with
    fewer than two events. `lost_tokens`, `repeated_tokens` and `foreign_tokens` compare the answer
    with the known one; `None` when it was not checked.
    """

    request_id: str
    worker: int
    model: str
    api: str
    scheduled_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    ended_s: float
    planned_input_tokens: int
    planned_output_tokens: int
    error: str | None = None
    detail: str | None = None
    http_status: int | None = None
    attempts: int = 1
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    num_chunks: int = 0
    gap_counts: dict[int, int] = {}
    longest_gap_s: float | None = None
    longest_gap_at_s: float | None = None
    finish_reason: str | None = None
    session_id: str | None = None
    turn: int = 0
    tenant: str | None = None
    priority: int = 0
    lost_tokens: int | None = None
    repeated_tokens: int | None = None
    foreign_tokens: int | None = None

    @property
    def is_ok(self) -> bool:
        """Returns whether a whole answer came."""
        return self.error is None


class ClientSample(msgspec.Struct, frozen=True, tag="client", tag_field="kind"):
    """The sample of one second of one worker.

    `cpu_ratio` is of one core; `loop_lag_s` is the longest by which the event loop woke a 5 ms
    sleeper late, and `loop_lag_counts` the histogram of all of them. `in_flight` is as of its end;
    `num_sent` are the requests sent in that second, `num_token_events` the events read in it.
    """

    at_s: float
    worker: int
    cpu_ratio: float
    loop_lag_s: float
    loop_lag_counts: dict[int, int]
    in_flight: int
    num_sent: int
    num_token_events: int


class FleetSample(msgspec.Struct, frozen=True, tag="fleet", tag_field="kind"):
    """The platform's slices at one instant, from its `/fleet`; absent for other servers.

    Slices and chips by compute class and state: `{"spot": {"ready": {"slices": 2, "chips": 32}}}`.
    """

    at_s: float
    slices: dict[str, dict[str, dict[str, int]]]


class EventRecord(msgspec.Struct, frozen=True, tag="event", tag_field="kind"):
    """The record of a disturbance made on purpose. `until_s` is `None` for an instant."""

    at_s: float
    action: str
    target: str
    detail: str = ""
    until_s: float | None = None
    error: str | None = None


class RunEnd(msgspec.Struct, frozen=True, tag="run_end", tag_field="kind"):
    """The last record: when the run was over, and why if it was cut short."""

    at_s: float
    reason: str | None = None


Record = RunStart | RequestRecord | ClientSample | FleetSample | EventRecord | RunEnd

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record, strict=False)


def encode(record: Record) -> bytes:
    """Returns one line, its end included."""
    return _ENCODER.encode(record) + b"\n"


def decode(line: bytes) -> Record:
    """The record of one line.

    Raises:
        msgspec.DecodeError: it is no record (`msgspec.ValidationError` is one of these).
    """
    return _DECODER.decode(line)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file in the order they were written. A last line cut short is left out.

    Raises:
        msgspec.DecodeError: a line that is no record.
    """
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decode(line)
