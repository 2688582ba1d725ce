"""Writes and reads the daily table as a Parquet file, for pandas, DuckDB and pyarrow."""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deployments.ledger.daily import Amounts, RowKey, Sums, TableFileError

# As in docs/reference/metrics.md.
SCHEMA = pa.schema(
    [
        pa.field("day", pa.date32(), nullable=False),
        pa.field("scope", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("compute_class", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("tenant", pa.string()),
        pa.field("slice", pa.string()),
        pa.field("chip_seconds", pa.float64(), nullable=False),
        pa.field("cost_usd", pa.float64()),
        pa.field("tokens", pa.int64()),
        pa.field("from_utc", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("until_utc", pa.timestamp("ms", tz="UTC"), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class DayTable:
    """The sums of one UTC day, with their first and last instant in seconds since the epoch."""

    day: datetime.date
    from_s: float
    until_s: float
    sums: Sums


def write_table(path: Path, table: DayTable) -> None:
    """Writes rows in a stable order. A reader sees the file before or after, never half of it."""
    ends_s = (table.from_s, table.until_s)
    times = [datetime.datetime.fromtimestamp(end_s, datetime.UTC) for end_s in ends_s]
    order = sorted(table.sums, key=lambda key: tuple(part or "" for part in key))
    rows = [
        dict(zip(SCHEMA.names, [table.day, *key, *table.sums[key], *times], strict=True))
        for key in order
    ]
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_table(path: Path) -> DayTable | None:
    """Returns what `write_table` wrote; `None` without a file, or with one that has no row.

    Raises:
        TableFileError: it is something else.
    """
    if not path.exists():
        return None
    try:
        rows = pq.ParquetFile(path).read().cast(SCHEMA).to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise TableFileError(f"{path} is no daily table: {error}") from error
    if not rows:
        return None
    names = ("scope", "state", "compute_class", "model", "tenant", "slice")
    sums = {
        RowKey(*(row[name] for name in names)): Amounts(
            row["chip_seconds"], row["cost_usd"], row["tokens"]
        )
        for row in rows
    }
    first = rows[0]
    return DayTable(
        first["day"], first["from_utc"].timestamp(), first["until_utc"].timestamp(), sums
    )
