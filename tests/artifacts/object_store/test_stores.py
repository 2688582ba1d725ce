"""One contract, over a folder, S3's client and GCS's client against a real server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.artifacts.object_store.address import address_problem, open_store
from serving.artifacts.object_store.directory import DirectoryStore
from serving.artifacts.object_store.store import MissingObjectError, ObjectStore, StoreError


def test_object_that_was_put_is_read_listed_and_replaced(any_store: ObjectStore) -> None:
    any_store.put("a/b/one", b"first")
    any_store.put("a/two", bytes(range(256)) * 5000)
    any_store.put("a/b/one", b"second")
    assert any_store.get("a/b/one") == b"second"
    assert [(each.name, each.num_bytes) for each in any_store.list("a")] == [
        ("a/b/one", 6),
        ("a/two", 1_280_000),
    ]
    assert [each.name for each in any_store.list("a/b")] == ["a/b/one"]
    described = any_store.head("a/two")
    assert described is not None
    assert described == any_store.list("a")[1]


def test_object_that_is_not_there_is_told_from_a_store_that_fails(any_store: ObjectStore) -> None:
    with pytest.raises(MissingObjectError, match="a/none: no such object"):
        any_store.get("a/none")
    assert any_store.head("a/none") is None
    assert any_store.list("nowhere") == []
    any_store.delete("a/none")


def test_deleted_object_is_gone(any_store: ObjectStore) -> None:
    any_store.put("a", b"1")
    any_store.delete("a")
    assert any_store.head("a") is None


def test_reader_of_an_object_that_is_replaced_sees_one_whole_version(
    any_store: ObjectStore,
) -> None:
    versions = [bytes([number]) * 200_000 for number in range(6)]
    any_store.put("a", versions[0])
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(any_store.put, "a", data) for data in versions]
        reads = [pool.submit(any_store.get, "a") for _ in range(12)]
        assert {read.result() for read in reads} <= set(versions)
        assert [write.result() for write in writes] == [None] * len(versions)


def test_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for name in ("../x", "a/../../x", "/etc/passwd", "a//b", ""):
        with pytest.raises(ValueError, match="not the name of an object"):
            store.put(name, b"")


def test_folder_that_cannot_be_written_is_a_store_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = DirectoryStore(tmp_path / "file")
    with pytest.raises(StoreError, match="file"):
        store.put("a", b"1")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("/mnt/x", None),
        ("gs://bucket", None),
        ("s3://bucket/deep/er", None),
        ("gs://", "names no bucket"),
        ("https://host/x", "no store is reached by https://"),
        ("xla", "a relative folder is another one on each host"),
    ],
)
def test_addresses(address: str, problem: str | None) -> None:
    assert address_problem(address) == problem
    if problem is not None:
        with pytest.raises(ValueError, match=problem):
            open_store(address)
