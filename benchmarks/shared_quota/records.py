"""What is kept of the days, in `docs/results/shared-quota.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

REPORT = Path(__file__).resolve().parents[2] / "docs/results/shared-quota.md"
RECORD = REPORT.with_suffix(".json")


class ModelDay(msgspec.Struct, frozen=True):
    """The day of one model. `num_slices_begun` counts slices that it got, each time again.

    `bought_usd` is what it cost besides what is prepaid.
    """

    num_requests: int
    slo_ratio: float
    ttft_p99_s: float
    reserved_slice_hours: float
    bought_usd: float
    num_slices_begun: int


class DayRun(msgspec.Struct, frozen=True):
    """A day of both models, by their names."""

    case: str
    way: str
    seed: int
    models: Mapping[str, ModelDay]


class Record(msgspec.Struct, frozen=True):
    """All days, simulated at one commit."""

    date: str
    commit: str
    runs: Sequence[DayRun]


def read_record() -> Record:
    """Returns what is on record."""
    return msgspec.json.decode(RECORD.read_bytes(), type=Record)


def write_record(record: Record) -> None:
    """Writes `RECORD`."""
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
