"""Readings, pairs and records of a run that nobody made."""

from pathlib import Path
from typing import Any

from benchmarks.side_by_side.loads import COMPARISONS, Comparison, Load
from benchmarks.side_by_side.reading import Reading
from benchmarks.side_by_side.records import Head, Pair, Records, Visit

HEAD = Head(
    code="89abcdef0123",
    commit="0123abc",
    settings=COMPARISONS,
    versions={"ray": "2.60.0"},
    command="python -m benchmarks",
    machine="2 CPU cores (x86_64)",
    python="3.11.7",
)


def reading(load: Load, **changes: Any) -> Reading:
    """A second in which every stream was answered at 50 tokens a second."""
    fields: dict[str, Any] = {
        "load": load.name,
        "window_s": 1.0,
        "num_answers": load.streams,
        "num_tokens": 50.0 * load.streams,
        "num_events": 25 * load.streams,
        "ttft_ms": (60.0, 90.0),
        "gap_ms": (40.0, 41.0),
        "cpu_s": {"gateway": 0.1, "HAProxy": 0.02, "engine host": 0.01, "client": 0.2},
        "other_cores": 0.0,
        "errors": {},
    }
    return Reading(**(fields | changes))


def pair(
    comparison: Comparison,
    turn: int = 0,
    ours: dict[str, Any] | None = None,
    theirs: dict[str, Any] | None = None,
) -> Pair:
    """A pair whose readings are changed as given, those of all loads alike."""
    visits = [
        Visit(system, 20.0, tuple(reading(load, **(changes or {})) for load in comparison.loads))
        for system, changes in ((comparison.ours, ours), (comparison.theirs, theirs))
    ]
    at = f"2026-11-25T0{turn % 10}:00:00+00:00"
    return Pair(comparison.key, turn, at, HEAD.commit, comparison.ours, *visits)


def records_with(folder: Path, *entries: Any) -> Records:
    """Records in a new file of that folder."""
    records = Records.open(folder / "records.jsonl", HEAD)
    for entry in entries:
        records.append(entry)
    return records
