"""What is the folder's own: unfinished uploads, and a database that is not ours."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.gateway.batches.sqlite.claims import next_batch
from serving.gateway.batches.sqlite.store import SqliteBatchStore

from .test_batch_stores import HOUR_S, LIFETIME_S, add_batch, add_file, claimed


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


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """New files are for others to read, unless who makes them says otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def rights_in(folder: Path) -> dict[str, int]:
    """The rights of all that is in a folder."""
    paths = sorted(folder.rglob("*"))
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.usefixtures("usual_umask")
def test_what_is_in_a_folder_that_was_there_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    folder.mkdir(mode=0o755)
    store = SqliteBatchStore(folder)
    add_file(store)
    begun = store.new_content()
    assert rights_in(folder) == {
        **dict.fromkeys(["batches.sqlite", "batches.sqlite-wal", "batches.sqlite-shm"], 0o600),
        **{"files": 0o700, "file-1": 0o600, begun.path.name: 0o600},
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    begun.discard()
    store.close()


@pytest.mark.usefixtures("usual_umask")
def test_database_of_an_earlier_build_is_for_its_user_alone_once_it_is_opened(
    tmp_path: Path,
) -> None:
    (tmp_path / "files").mkdir(mode=0o755)
    with sqlite3.connect(tmp_path / "batches.sqlite") as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE anything (x)")
    assert 0o600 not in rights_in(tmp_path).values()
    store = SqliteBatchStore(tmp_path)
    assert set(rights_in(tmp_path).values()) == {0o600, 0o700}
    store.close()
    database.close()


def work_of_a_claim(folder: Path, num_open: int) -> int:
    """The instructions that a claim takes of SQLite among so many batches of which some are leased.

    In hundreds.
    """
    store = SqliteBatchStore(folder)
    for number in range(num_open):
        add_batch(store, f"b{number}", f"tenant-{number % 4}", f"file-{number % 4}")
    for _ in range(num_open // 8):
        claimed(store)
    store.close()
    count = 0

    def passed() -> int:
        nonlocal count
        count += 1
        return 0

    with sqlite3.connect(folder / "batches.sqlite") as database:
        database.set_progress_handler(passed, 100)
        assert next_batch(database, 1.0) is not None
    database.close()
    return count


def test_claim_takes_no_more_than_in_proportion_to_the_open_batches(tmp_path: Path) -> None:
    few, many = (work_of_a_claim(tmp_path / str(num), num) for num in (80, 640))
    assert few > 10
    assert many < 2 * 8 * few


def test_record_of_a_newer_build_hides_no_other_batch(tmp_path: Path) -> None:
    store = SqliteBatchStore(tmp_path)
    add_batch(store, "b0")
    add_batch(store, "b1")
    with sqlite3.connect(tmp_path / "batches.sqlite") as database:
        database.execute(
            "UPDATE batches SET record = CAST(replace(CAST(record AS TEXT), 'validating', 'newer') "
            "AS BLOB) WHERE batch_id = 'b0'"
        )
    database.close()
    assert [each.batch_id for each in store.open_batches(10)] == ["b1"]
    store.close()


def test_folder_with_another_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        SqliteBatchStore(tmp_path)
