"""When records of the batch lane leave its database, and where lists go on without them.

Owns the columns and the table for that. Does not own the records, nor the contents of files
(`store`). Every call is part of a transaction of the caller's, and does a bounded part of
what is to be done with batches; gateways of one folder may call in any order.
"""

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any

from serving.gateway.batches.records import Batch
from serving.gateway.batches.store import MAX_SWEPT, PLACE_S

_COLUMN = "keep_until_s"
# The batches of an earlier build have no time until the next sweep, as those that have just ended.
_SCHEMA = (
    "CREATE INDEX IF NOT EXISTS batches_without_time ON batches (seq) "
    "WHERE has_ended = 1 AND keep_until_s IS NULL",
    "CREATE INDEX IF NOT EXISTS batches_by_time ON batches (keep_until_s) "
    "WHERE keep_until_s IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS gone (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
    "seq INTEGER NOT NULL, gone_at_s REAL NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS gone_by_age ON gone (gone_at_s)",
)


def add_schema(database: sqlite3.Connection) -> None:
    """Adds what is missing to a database, also to one of an earlier build."""
    columns = {row[1] for row in database.execute("PRAGMA table_info(batches)")}
    if _COLUMN not in columns:
        database.execute(f"ALTER TABLE batches ADD COLUMN {_COLUMN} REAL")
    for statement in _SCHEMA:
        database.execute(statement)


def note_gone(
    database: sqlite3.Connection, rows: Iterable[tuple[str, str, int]], now_s: float
) -> None:
    """Keeps the places of records that are deleted: id, tenant and number of each."""
    database.executemany(
        "INSERT OR REPLACE INTO gone (id, tenant, seq, gone_at_s) VALUES (?, ?, ?, ?)",
        [(*row, now_s) for row in rows],
    )


def forget_gone(database: sqlite3.Connection, now_s: float) -> None:
    """Forgets the places that no list needs any more."""
    database.execute("DELETE FROM gone WHERE gone_at_s <= ?", (now_s - PLACE_S,))


def expire_batches(
    database: sqlite3.Connection,
    read: Callable[[bytes], Batch],
    now_s: float,
    lifetime_s: float,
) -> tuple[list[str], bool]:
    """Deletes batches `lifetime_s` after their end, and not before their files of answers.

    Call it when the files that have expired are deleted. Returns the batches, and whether there may
    be more to do.
    """
    num_dated = _date_ended(database, read, lifetime_s)
    due = database.execute(
        "SELECT batch_id, tenant, seq, record FROM batches WHERE keep_until_s <= ? "
        "ORDER BY keep_until_s LIMIT ?",
        (now_s, MAX_SWEPT),
    ).fetchall()
    gone = []
    for *row, record in due:
        until_s = _files_until_s(database, read(record), now_s + lifetime_s)
        if until_s is None:
            gone.append(tuple(row))
        else:
            _keep(database, until_s, row[-1])
    database.executemany("DELETE FROM batches WHERE seq = ?", [(row[-1],) for row in gone])
    note_gone(database, gone, now_s)
    return [row[0] for row in gone], MAX_SWEPT in (num_dated, len(due))


def _date_ended(
    database: sqlite3.Connection, read: Callable[[bytes], Batch], lifetime_s: float
) -> int:
    """Notes how long batches that have ended stay; returns how many."""
    ended = database.execute(
        "SELECT seq, record FROM batches WHERE has_ended = 1 AND keep_until_s IS NULL "
        "ORDER BY seq LIMIT ?",
        (MAX_SWEPT,),
    ).fetchall()
    for seq, record in ended:
        batch = read(record)
        _keep(database, batch.entered[batch.status] + lifetime_s, seq)
    return len(ended)


def _keep(database: sqlite3.Connection, until_s: float, seq: int) -> None:
    database.execute("UPDATE batches SET keep_until_s = ? WHERE seq = ?", (until_s, seq))


def _files_until_s(database: sqlite3.Connection, batch: Batch, unknown_s: float) -> float | None:
    """Returns when a batch's last file of answers expires; `None` if there is none any more.

    `unknown_s` is when to look again after one that does not expire by itself.
    """
    rows: list[tuple[Any, ...]] = database.execute(
        "SELECT coalesce(expires_at_s, ?) FROM files WHERE file_id IN (?, ?)",
        (unknown_s, batch.output_file_id, batch.error_file_id),
    ).fetchall()
    return max((row[0] for row in rows), default=None)
