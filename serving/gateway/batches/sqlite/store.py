"""Keeps the batch lane in one folder: records in an SQLite database, contents as files beside it.

For gateways of one node, which all open the folder. A change is one transaction of one writer. A
content is written whole and flushed before its record is, so a crash leaves contents without
records at most; `sweep` deletes those. Owns the transactions, and `rows` what is in the tables.
`store` of the lane says what each call does.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from serving.gateway.batches.records import (
    TAKING_ANSWERS,
    Batch,
    BatchCost,
    BatchLease,
    FilePurpose,
    LineAnswer,
    StoredFile,
)
from serving.gateway.batches.sqlite.claims import OPEN_IN_TURN, next_batch
from serving.gateway.batches.sqlite.contents import ContentFolder, FileContent
from serving.gateway.batches.sqlite.expiry import (
    add_schema,
    expire_batches,
    forget_gone,
    note_gone,
)
from serving.gateway.batches.sqlite.private import make_private_database
from serving.gateway.batches.sqlite.rows import (
    FILE_COLUMNS,
    SCHEMA,
    batch_of,
    check_room,
    clause_of,
    file_of,
    insert_answer,
    insert_file,
    leased_batch,
    num_bytes_of,
    packed_batch,
    readable_batch,
    update_batch,
)
from serving.gateway.batches.store import (
    NO_BOUNDS,
    Claim,
    FileInUseError,
    MissingFileError,
    NewContent,
    Page,
    StoreFullError,
    Swept,
    TenantBounds,
)

# How long a writer waits for another one.
_BUSY_S = 30.0
# Answers that are read at once.
_PAGE = 200


class SqliteBatchStore:
    """The batch lane in a folder. Implements `BatchStore`."""

    write_interval_s = 0.0

    def __init__(self, folder: Path) -> None:
        """Opens the folder, and makes it if there is none.

        A folder that is there keeps its rights; what is put into it is for its user alone.

        Raises:
            OSError: it cannot be written to.
            sqlite3.Error: its database is not one of ours.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._contents = ContentFolder(folder / "files")
        self._lock = threading.Lock()
        path = folder / "batches.sqlite"
        make_private_database(path)
        self._database = sqlite3.connect(
            path, _BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        # What a power failure takes is the last transactions, whole: their lines are asked again.
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(SCHEMA)
        with self._transaction() as database:
            add_schema(database)

    # -- files --

    def new_content(self) -> FileContent:
        """Begins a content in the folder."""
        return self._contents.begin()

    def add_file(self, file: StoredFile, content: NewContent, max_tenant_bytes: int) -> None:
        """Makes a file; see `BatchStore.add_file`."""
        written = _written(content)
        self._contents.keep(written, file.file_id)
        with self._transaction() as database:
            num_bytes = num_bytes_of(database, file.tenant)
            if num_bytes + file.num_bytes > max_tenant_bytes:
                raise StoreFullError(num_bytes, max_tenant_bytes)
            insert_file(database, file)
        written.belongs()

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Returns a tenant's file."""
        where = "tenant = ? AND file_id = ?"
        found = self._rows(f"SELECT {FILE_COLUMNS} FROM files WHERE {where}", tenant, file_id)
        return file_of(found[0]) if found else None

    def files(self, tenant: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Returns a tenant's files, the newest first unless the page says otherwise."""
        where, values = clause_of("files", "file_id", tenant, page)
        if purpose is not None:
            where, values = f"purpose = ? AND {where}", [purpose, *values]
        found = self._rows(f"SELECT {FILE_COLUMNS} FROM files WHERE {where}", *values)
        return [file_of(row) for row in found]

    def delete_file(self, tenant: str, file_id: str, now_s: float) -> bool:
        """Deletes a file; see `BatchStore.delete_file`."""
        with self._transaction() as database:
            users = database.execute(
                "SELECT batch_id FROM batches WHERE input_file_id = ? AND has_ended = 0",
                (file_id,),
            ).fetchone()
            deleted = database.execute(
                "DELETE FROM files WHERE tenant = ? AND file_id = ? RETURNING file_id, tenant, seq",
                (tenant, file_id),
            ).fetchall()
            if deleted and users is not None:
                raise FileInUseError(users[0])
            note_gone(database, deleted, now_s)
        if deleted:
            self._contents.delete(file_id)
        return bool(deleted)

    def open_content(self, tenant: str, file_id: str) -> BinaryIO:
        """Opens the content of a file; see `BatchStore.open_content`."""
        if self.file(tenant, file_id) is None:
            raise MissingFileError(file_id)
        return self._contents.open(file_id)

    def sweep(self, now_s: float, batch_lifetime_s: float) -> Swept:
        """Deletes what has had its time; see `BatchStore.sweep`."""
        with self._transaction() as database:
            files = database.execute(
                "DELETE FROM files WHERE expires_at_s <= ? AND NOT EXISTS (SELECT 1 FROM batches "
                "WHERE input_file_id = file_id AND has_ended = 0) RETURNING file_id, tenant, seq",
                (now_s,),
            ).fetchall()
            batch_ids, has_more = expire_batches(database, batch_of, now_s, batch_lifetime_s)
            note_gone(database, files, now_s)
            forget_gone(database, now_s)
            kept = {row[0] for row in database.execute("SELECT file_id FROM files")}
        self._contents.sweep(kept, now_s)
        file_ids = [row[0] for row in files]
        for file_id in file_ids:
            self._contents.delete(file_id)
        return Swept(file_ids, batch_ids, has_more)

    # -- batches --

    def add_batch(self, batch: Batch, bounds: TenantBounds = NO_BOUNDS) -> None:
        """Takes a batch in; see `BatchStore.add_batch`."""
        with self._transaction() as database:
            check_room(database, batch.tenant, bounds)
            found = database.execute(
                "SELECT 1 FROM files WHERE tenant = ? AND file_id = ? AND purpose = ?",
                (batch.tenant, batch.input_file_id, FilePurpose.BATCH),
            ).fetchone()
            if found is None:
                raise MissingFileError(batch.input_file_id)
            database.execute(
                "INSERT INTO batches (batch_id, tenant, input_file_id, has_ended, record) "
                "VALUES (?, ?, ?, 0, ?)",
                (batch.batch_id, batch.tenant, batch.input_file_id, packed_batch(batch)),
            )

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns a tenant's batch."""
        sql = "SELECT record FROM batches WHERE tenant = ? AND batch_id = ?"
        found = self._rows(sql, tenant, batch_id)
        return batch_of(found[0][0]) if found else None

    def batches(self, tenant: str, page: Page) -> list[Batch]:
        """Returns a tenant's batches, the newest first unless the page says otherwise."""
        where, values = clause_of("batches", "batch_id", tenant, page)
        found = self._rows(f"SELECT record FROM batches WHERE {where}", *values)
        return [batch_of(row[0]) for row in found]

    def open_batches(self, limit: int) -> list[Batch]:
        """Returns batches that have not ended; see `BatchStore.open_batches`."""
        found = (readable_batch(*row) for row in self._rows(OPEN_IN_TURN, limit))
        return [batch for batch in found if batch is not None]

    def change(self, tenant: str, batch_id: str, decide: Callable[[Batch], Batch]) -> Batch | None:
        """Changes a batch, whoever has it; see `BatchStore.change`."""
        with self._transaction() as database:
            row = database.execute(
                "SELECT record FROM batches WHERE tenant = ? AND batch_id = ?", (tenant, batch_id)
            ).fetchone()
            return None if row is None else update_batch(database, decide(batch_of(row[0])))

    def change_free(
        self, tenant: str, batch_id: str, now_s: float, decide: Callable[[Batch], Batch]
    ) -> Batch | None:
        """Changes a batch that nobody has; see `BatchStore.change_free`."""
        sql = "SELECT record FROM batches WHERE tenant = ? AND batch_id = ? AND until_s <= ?"
        with self._transaction() as database:
            row = database.execute(sql, (tenant, batch_id, now_s)).fetchone()
            return None if row is None else update_batch(database, decide(batch_of(row[0])))

    # -- by the owner of a batch --

    def claim(
        self, owner: str, now_s: float, lease_s: float, which: Claim = Claim.ANY
    ) -> BatchLease | None:
        """Leases a batch; see `BatchStore.claim`."""
        with self._transaction() as database:
            found = next_batch(database, now_s, which)
            if found is None:
                return None
            batch_id, term = found
            lease = BatchLease(batch_id, owner, term + 1, now_s + lease_s)
            database.execute(
                "UPDATE batches SET owner = ?, term = ?, until_s = ? WHERE batch_id = ?",
                (owner, lease.term, lease.until_s, lease.batch_id),
            )
            return lease

    def renew(self, lease: BatchLease, now_s: float, lease_s: float, cost: BatchCost) -> Batch:
        """Lengthens a lease; see `BatchStore.renew`."""
        with self._transaction() as database:
            batch = leased_batch(database, lease)
            database.execute(
                "UPDATE batches SET until_s = ? WHERE batch_id = ?",
                (now_s + lease_s, lease.batch_id),
            )
            if not cost.chip_ms:
                return batch
            return update_batch(database, replace(batch, cost=batch.cost + cost))

    def release(self, lease: BatchLease) -> None:
        """Gives a batch back, if it is still the lease's."""
        with self._transaction() as database:
            database.execute(
                "UPDATE batches SET owner = NULL, until_s = 0 WHERE batch_id = ? AND term = ?",
                (lease.batch_id, lease.term),
            )

    def change_leased(self, lease: BatchLease, decide: Callable[[Batch], Batch]) -> Batch:
        """Changes a leased batch; see `BatchStore.change_leased`."""
        with self._transaction() as database:
            return update_batch(database, decide(leased_batch(database, lease)))

    def add_answers(self, lease: BatchLease, answers: Sequence[LineAnswer]) -> Batch:
        """Keeps answers; see `BatchStore.add_answers`."""
        with self._transaction() as database:
            batch = leased_batch(database, lease)
            if batch.status not in TAKING_ANSWERS:
                return batch
            new = [answer for answer in answers if insert_answer(database, lease, answer)]
            num_failed = sum(answer.is_failure for answer in new)
            counted = replace(
                batch,
                num_completed=batch.num_completed + len(new) - num_failed,
                num_failed=batch.num_failed + num_failed,
                usage=sum((answer.usage for answer in new), batch.usage),
            )
            return update_batch(database, counted)

    def answered_lines(self, batch_id: str) -> set[int]:
        """Returns the lines with an answer."""
        sql = "SELECT line FROM answers WHERE batch_id = ?"
        return {row[0] for row in self._rows(sql, batch_id)}

    def answers(self, batch_id: str) -> Iterator[LineAnswer]:
        """Yields answers, a page at a time."""
        after = 0
        sql = (
            "SELECT line, is_failure, record FROM answers WHERE batch_id = ? AND line > ? "
            "ORDER BY line LIMIT ?"
        )
        while rows := self._rows(sql, batch_id, after, _PAGE):
            for line, is_failure, record in rows:
                yield LineAnswer(line, bool(is_failure), record)
            after = rows[-1][0]

    def end(
        self,
        lease: BatchLease,
        files: Sequence[tuple[StoredFile, NewContent]],
        decide: Callable[[Batch], Batch],
    ) -> Batch:
        """Ends a batch; see `BatchStore.end`."""
        written = [(file, _written(content)) for file, content in files]
        for file, content in written:
            self._contents.keep(content, file.file_id)
        with self._transaction() as database:
            batch = decide(leased_batch(database, lease))
            for file, _ in written:
                insert_file(database, file)
            update_batch(database, batch)
            database.execute("DELETE FROM answers WHERE batch_id = ?", (lease.batch_id,))
        for _, content in written:
            content.belongs()
        return batch

    def close(self) -> None:
        """Closes the database. Idempotent."""
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One writer at a time, of all threads and processes."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(sql, values).fetchall()


def _written(content: NewContent) -> FileContent:
    assert isinstance(content, FileContent), "the content is of another store"
    return content
