"""The tables of the lane's database, and what is in their rows.

Does not own transactions: every call is part of one of the caller's (`store`).
"""

import logging
import sqlite3
from typing import Any

import msgspec

from serving.gateway.batches.records import (
    Batch,
    BatchLease,
    FilePurpose,
    LineAnswer,
    StoredFile,
)
from serving.gateway.batches.store import (
    LeaseLostError,
    Page,
    StoreFullError,
    TenantBounds,
    TooManyOpenError,
)

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, file_id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  filename TEXT NOT NULL, purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL,
  created_at_s REAL NOT NULL, expires_at_s REAL);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, seq);
CREATE TABLE IF NOT EXISTS batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, batch_id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  input_file_id TEXT NOT NULL, has_ended INTEGER NOT NULL, record BLOB NOT NULL,
  owner TEXT, term INTEGER NOT NULL DEFAULT 0, until_s REAL NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, seq);
CREATE INDEX IF NOT EXISTS batches_to_do ON batches (has_ended, seq);
CREATE TABLE IF NOT EXISTS answers (
  batch_id TEXT NOT NULL, line INTEGER NOT NULL, is_failure INTEGER NOT NULL, record BLOB NOT NULL,
  PRIMARY KEY (batch_id, line)) WITHOUT ROWID;
"""
_BATCHES = msgspec.json.Decoder(Batch)
FILE_COLUMNS = "file_id, tenant, filename, purpose, num_bytes, created_at_s, expires_at_s"


def insert_file(database: sqlite3.Connection, file: StoredFile) -> None:
    """Adds the record of a file."""
    database.execute(
        f"INSERT INTO files ({FILE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(file.file_id, file.tenant, file.filename, file.purpose, file.num_bytes),
            *(file.created_at_s, file.expires_at_s),
        ),
    )


def check_room(database: sqlite3.Connection, tenant: str, bounds: TenantBounds) -> None:
    """Refuses one more batch of a tenant that has as much as it may.

    Raises:
        TooManyOpenError: so many have not ended.
        StoreFullError: its files are larger than they may be.
    """
    sql = "SELECT count(*) FROM batches WHERE tenant = ? AND has_ended = 0"
    (num_open,) = database.execute(sql, (tenant,)).fetchone()
    if num_open >= bounds.max_open_batches:
        raise TooManyOpenError(num_open, bounds.max_open_batches)
    num_bytes = num_bytes_of(database, tenant)
    if num_bytes > bounds.max_bytes:
        raise StoreFullError(num_bytes, bounds.max_bytes)


def num_bytes_of(database: sqlite3.Connection, tenant: str) -> int:
    """Returns the bytes of all files of a tenant."""
    sql = "SELECT coalesce(sum(num_bytes), 0) FROM files WHERE tenant = ?"
    num_bytes: int = database.execute(sql, (tenant,)).fetchone()[0]
    return num_bytes


def file_of(row: tuple[Any, ...]) -> StoredFile:
    """Returns a file by its `FILE_COLUMNS`."""
    file_id, tenant, filename, purpose, *rest = row
    return StoredFile(file_id, tenant, filename, FilePurpose(purpose), *rest)


def clause_of(table: str, key: str, tenant: str, page: Page) -> tuple[str, list[Any]]:
    """Returns the end of a query for a page of a tenant's records, and its values."""
    where, values = "tenant = ?", [tenant]
    if page.after is not None:
        beyond = ">" if page.is_oldest_first else "<"
        # The list goes on where it was, also behind a record that has gone meanwhile.
        where += (
            f" AND seq {beyond} (SELECT seq FROM {table} WHERE tenant = ? AND {key} = ? "
            "UNION ALL SELECT seq FROM gone WHERE tenant = ? AND id = ?)"
        )
        values += [tenant, page.after] * 2
    order = "ASC" if page.is_oldest_first else "DESC"
    return f"{where} ORDER BY seq {order} LIMIT ?", [*values, page.limit]


def leased_batch(database: sqlite3.Connection, lease: BatchLease) -> Batch:
    """Returns the batch of a lease.

    Raises:
        LeaseLostError: somebody else has it.
    """
    row = database.execute(
        "SELECT record FROM batches WHERE batch_id = ? AND owner = ? AND term = ?",
        (lease.batch_id, lease.owner, lease.term),
    ).fetchone()
    if row is None:
        raise LeaseLostError(lease.batch_id)
    return batch_of(row[0])


def update_batch(database: sqlite3.Connection, batch: Batch) -> Batch:
    """Replaces the record of a batch, which it returns."""
    database.execute(
        "UPDATE batches SET record = ?, has_ended = ? WHERE batch_id = ?",
        (packed_batch(batch), batch.has_ended, batch.batch_id),
    )
    return batch


def insert_answer(database: sqlite3.Connection, lease: BatchLease, answer: LineAnswer) -> bool:
    """Keeps an answer; returns whether its line had none."""
    done = database.execute(
        "INSERT OR IGNORE INTO answers (batch_id, line, is_failure, record) VALUES (?, ?, ?, ?)",
        (lease.batch_id, answer.line, answer.is_failure, answer.record),
    )
    return done.rowcount > 0


def packed_batch(batch: Batch) -> bytes:
    """Returns a batch as its record has it."""
    return msgspec.json.encode(batch)


def readable_batch(batch_id: str, record: bytes) -> Batch | None:
    """Returns a batch; `None` if this build cannot read it, as one of a newer build."""
    try:
        return batch_of(record)
    except msgspec.DecodeError as error:
        logger.warning("batch_unreadable batch=%s reason=%s", batch_id, error)
        return None


def batch_of(record: bytes) -> Batch:
    """Returns the batch of a record.

    Raises:
        msgspec.DecodeError: this build cannot read it.
    """
    return _BATCHES.decode(record)
