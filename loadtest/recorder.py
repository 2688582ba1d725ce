"""The files of a run while it lasts, and their merging into `requests.jsonl`.

Every process writes a part of its own, each record as it happens and by one write of its own: a
process that is killed loses nothing that had ended. Parts are merged when the run is over, or later
if the run was cut off.
"""

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from loadtest.errors import LoadTestError
from loadtest.records import Record, RequestRecord, RunEnd, RunStart, decode, encode, read_records

RECORDS_FILE = "requests.jsonl"
_RUN_PART = "part-run.jsonl"
_PARTS = "part-*.jsonl"


def run_part(out_dir: Path) -> Path:
    """Returns where the parent of the run writes: its start and end, the fleet, the events."""
    return out_dir / _RUN_PART


def worker_part(out_dir: Path, worker: int) -> Path:
    """Returns where a worker writes: its requests and the samples of itself."""
    return out_dir / f"part-worker-{worker}.jsonl"


def answers_part(out_dir: Path, worker: int) -> Path:
    """Returns where a worker leaves the answers that it recorded for a later run."""
    return out_dir / f"answers-{worker}.jsonl"


class RequestRecorder:
    """Appends records to one part."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Writes it out before it returns."""
        self._file.write(encode(record))


def merge_parts(out_dir: Path) -> Path:
    """Merges the parts of a run, in the order of time, and removes them. Idempotent.

    The start is the first record and the end the last. Of a run that was cut short, the start has
    how many requests were scheduled until then. A run whose parent was killed has no end.

    Raises:
        LoadTestError: there is neither a merged file nor a start of a run.
    """
    merged = out_dir / RECORDS_FILE
    parts = sorted(out_dir.glob(_PARTS))
    if not parts:
        if merged.exists():
            return merged
        msg = f"{out_dir} holds no run: neither {RECORDS_FILE} nor {_RUN_PART}"
        raise LoadTestError(msg)
    start, end = _bounds(out_dir)
    unfinished = merged.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.write(encode(start))
        for _, line in heapq.merge(*(_timed_lines(part) for part in parts)):
            file.write(line)
        if end is not None:
            file.write(encode(end))
    unfinished.replace(merged)
    for part in parts:
        part.unlink()
    return merged


def _bounds(out_dir: Path) -> tuple[RunStart, RunEnd | None]:
    part = run_part(out_dir)
    start: RunStart | None = None
    end: RunEnd | None = None
    for record in read_records(part) if part.exists() else ():
        if isinstance(record, RunStart):
            start = record
        elif isinstance(record, RunEnd):
            end = record
    if start is None:
        msg = f"{part} has no start of a run"
        raise LoadTestError(msg)
    return start, end


def _timed_lines(part: Path) -> Iterator[tuple[float, bytes]]:
    """Yields lines with their instants: a request's is its end, when it was written."""
    with part.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                continue  # cut short by a kill
            record = decode(line)
            if isinstance(record, RequestRecord):
                yield record.ended_s, line
            elif not isinstance(record, RunStart | RunEnd):
                yield record.at_s, line
