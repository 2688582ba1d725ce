"""What is the folder's own: unfinished uploads, and a database that is not ours."""

import sqlite3
from pathlib import Path

import pytest

from serving.gateway.batches.sqlite.store import SqliteBatchStore

from .test_batch_stores import HOUR_S, LIFETIME_S


def test_sweep_leaves_what_is_being_uploaded(tmp_path: Path) -> None:
    store = SqliteBatchStore(tmp_path)
    begun = store.new_content()
    begun.write(b"half")
    modified_s = begun.path.stat().st_mtime
    store.sweep(modified_s + HOUR_S, LIFETIME_S)
    assert begun.path.exists()
    store.sweep(modified_s + 7 * HOUR_S, LIFETIME_S)
    assert not begun.path.exists()
    begun.discard()
    store.close()


def test_folder_with_another_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        SqliteBatchStore(tmp_path)
