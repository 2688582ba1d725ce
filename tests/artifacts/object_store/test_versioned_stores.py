"""What the writes on a condition promise, of buckets in memory, of S3's client and of GCS's."""

import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.artifacts.object_store.address import open_bucket
from serving.artifacts.object_store.store import (
    ConflictError,
    MissingObjectError,
    VersionedStore,
)

from .servers import bucket_at
from .strict_server import StrictBucket


def test_object_is_made_once(versioned_store: VersionedStore) -> None:
    versioned_store.write_if("a/one", b"first", None)
    with pytest.raises(ConflictError, match="a/one"):
        versioned_store.write_if("a/one", b"second", None)
    assert versioned_store.get("a/one") == b"first"


def test_version_is_replaced_once(versioned_store: VersionedStore) -> None:
    first = versioned_store.write_if("a/one", b"first", None)
    second = versioned_store.write_if("a/one", b"second", first)
    found = versioned_store.read("a/one")
    assert (found.data, found.version) == (b"second", second)
    for version in (first, None):
        with pytest.raises(ConflictError):
            versioned_store.write_if("a/one", b"third", version)
    versioned_store.put("a/one", b"other")
    with pytest.raises(ConflictError):
        versioned_store.write_if("a/one", b"third", second)
    assert versioned_store.get("a/one") == b"other"


def test_object_that_is_gone_is_not_replaced(versioned_store: VersionedStore) -> None:
    version = versioned_store.write_if("a/one", b"first", None)
    versioned_store.delete("a/one")
    with pytest.raises((ConflictError, MissingObjectError)):
        versioned_store.write_if("a/one", b"second", version)
    with pytest.raises(MissingObjectError):
        versioned_store.read("a/one")


def test_file_is_uploaded_and_read_in_parts(versioned_store: VersionedStore) -> None:
    data = bytes(range(256)) * 40
    versioned_store.upload("c/one", io.BytesIO(data))
    assert versioned_store.get("c/one") == data
    assert versioned_store.read_range("c/one", 250, 260) == data[250:260]
    assert versioned_store.read_range("c/one", 10_000, 20_000) == data[10_000:]
    versioned_store.upload("c/none", io.BytesIO(b""))
    assert versioned_store.get("c/none") == b""


def test_list_goes_on_behind_a_name(versioned_store: VersionedStore) -> None:
    for name in ("a/1", "a/2", "a/b/3", "ab/4"):
        versioned_store.put(name, b"x")
    assert [each.name for each in versioned_store.list_from("a")] == ["a/1", "a/2", "a/b/3"]
    assert [each.name for each in versioned_store.list_from("a", "a/1")] == ["a/2", "a/b/3"]
    assert list(versioned_store.list_from("a", "a/b/3")) == []


def test_many_are_deleted_at_once(versioned_store: VersionedStore) -> None:
    for name in ("a/1", "a/2", "a/3"):
        versioned_store.put(name, b"x")
    versioned_store.delete_all(["a/1", "a/none", "a/3"])
    versioned_store.delete_all([])
    assert [each.name for each in versioned_store.list("a")] == ["a/2"]


@pytest.mark.process
def test_long_file_is_uploaded_in_parts(
    store_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = bucket_at(store_server, "s3", monkeypatch)
    data = random.Random(0).randbytes(20_000_001)
    (tmp_path / "long").write_bytes(data)
    with (tmp_path / "long").open("rb") as content:
        store.upload("long", content)
    assert store.get("long") == data
    assert store.read_range("long", 8_388_600, 8_388_620) == data[8_388_600:8_388_620]
    described = store.head("long")
    assert described is not None
    assert "-" in str(described.version), "S3 tells by the tag that it was uploaded in parts"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_of_writers_of_one_version_one_wins(
    kind: str, strict_bucket: StrictBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket_at(strict_bucket.url, kind, monkeypatch)
    begin = threading.Barrier(8)

    def write(number: int) -> bool:
        begin.wait()
        try:
            store.write_if("a", bytes([number]), None)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert won.count(True) == 1
    assert store.get("a") == bytes([won.index(True)])


@pytest.mark.process
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_write_whose_answer_is_lost_is_its_own_conflict(
    kind: str, strict_bucket: StrictBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends it again, and finds what it wrote itself: `documents` has to know that."""
    store = bucket_at(strict_bucket.url, kind, monkeypatch)
    monkeypatch.setattr(strict_bucket, "lose_every", 1)
    with pytest.raises(ConflictError):
        store.write_if("a", b"mine", None)
    assert store.get("a") == b"mine"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_object_that_was_written_a_moment_ago_is_written_a_moment_later(
    kind: str, strict_bucket: StrictBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket_at(strict_bucket.url, kind, monkeypatch)
    version = store.write_if("a", b"1", None)
    monkeypatch.setattr(strict_bucket, "writes_apart_s", 1.0)
    store.write_if("a", b"2", version)
    assert strict_bucket.num_refused > 0
    assert store.get("a") == b"2"


def test_folder_is_no_bucket() -> None:
    with pytest.raises(ValueError, match="no address of a bucket"):
        open_bucket("/a/folder")
