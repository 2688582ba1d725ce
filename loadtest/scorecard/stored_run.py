"""The records of one run by kind, and which of its requests are judged.

Owns the reading of `requests.jsonl` and the window that is judged. Measures nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.errors import LoadTestError
from loadtest.records import (
    ClientSample,
    EventRecord,
    FleetSample,
    Record,
    RequestRecord,
    RunEnd,
    RunStart,
    read_records,
)

RECORDS_FILE = "requests.jsonl"

_Timed = TypeVar("_Timed", ClientSample, FleetSample, EventRecord)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The records of one run. `end` is `None` when the client did not live to write it."""

    start: RunStart
    requests: tuple[RequestRecord, ...]
    client: tuple[ClientSample, ...]
    fleet: tuple[FleetSample, ...]
    events: tuple[EventRecord, ...]
    end: RunEnd | None

    @property
    def ended_s(self) -> float:
        """The end of the run, or the last instant that is known of it."""
        if self.end is not None:
            return self.end.at_s
        ends = (request.ended_s for request in self.requests)
        watched = (sample.at_s for sample in self.client)
        fleet = (sample.at_s for sample in self.fleet)
        return max((*ends, *watched, *fleet), default=0.0)

    @property
    def cut_short(self) -> str | None:
        """Returns why the run is not whole; `None` when it is."""
        if self.end is None:
            return "the records end before the run did"
        return self.end.reason

    @property
    def window_s(self) -> tuple[float, float]:
        """The steady window: from the end of the warm-up to that of the schedule, or of the run."""
        until_s = min(self.start.duration_s, self.ended_s)
        return self.start.warmup_s, max(until_s, self.start.warmup_s)

    @property
    def window_length_s(self) -> float:
        """The length of the steady window; 0 for a run that did not outlive its warm-up."""
        from_s, until_s = self.window_s
        return until_s - from_s

    @property
    def judged(self) -> tuple[RequestRecord, ...]:
        """The requests due after the warm-up, whenever they ended."""
        from_s = self.start.warmup_s
        return tuple(request for request in self.requests if request.scheduled_s >= from_s)

    @property
    def num_missing(self) -> int:
        """The number of scheduled requests without a record. Some may have been warm-up.

        Later turns of a session fall due only when the turn before has ended, so none is missed.
        """
        if self.start.num_scheduled is None:
            return 0
        recorded = {request.request_id for request in self.requests if request.turn == 0}
        return max(0, self.start.num_scheduled - len(recorded))


def gather(records: list[Record]) -> StoredRun:
    """The records of a run, in any order after the first.

    Raises:
        LoadTestError: there is not exactly one start, or it is impossible.
    """
    starts = [record for record in records if isinstance(record, RunStart)]
    if len(starts) != 1:
        raise LoadTestError(f"{len(starts)} records of kind run_start; a run has exactly 1")
    (start,) = starts
    if not 0 <= start.warmup_s < start.duration_s:
        limit = f"at least 0 and below duration_s, {start.duration_s:g}"
        raise LoadTestError(f"run_start.warmup_s: {start.warmup_s:g}; allowed: {limit}")
    ends = [record for record in records if isinstance(record, RunEnd)]
    return StoredRun(
        start,
        tuple(record for record in records if isinstance(record, RequestRecord)),
        _of_kind(records, ClientSample),
        _of_kind(records, FleetSample),
        _of_kind(records, EventRecord),
        ends[-1] if ends else None,
    )


def _of_kind(records: list[Record], kind: type[_Timed]) -> tuple[_Timed, ...]:
    """Returns the records in order of time: several workers and the parent wrote them."""
    found = (record for record in records if isinstance(record, kind))
    return tuple(sorted(found, key=lambda record: record.at_s))


def read_run(directory: Path) -> StoredRun:
    """The run that a load test left in `directory`.

    Raises:
        LoadTestError: there is none, or its records are damaged.
    """
    path = directory / RECORDS_FILE
    try:
        return gather(list(read_records(path)))
    except OSError as error:
        raise LoadTestError(f"{path}: not readable: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise LoadTestError(f"{path}: a line is no record: {error}") from error
    except LoadTestError as error:
        raise LoadTestError(f"{path}: {error}") from error


def plan_lines(plan: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields every value that is set, with its dotted name, in the order of the plan."""
    for key, value in plan.items():
        if isinstance(value, Mapping):
            yield from plan_lines(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)
