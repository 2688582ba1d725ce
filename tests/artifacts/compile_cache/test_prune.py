"""What of a store goes, and that what stays is still whole."""

import os
import time
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.compile_cache import programs
from serving.artifacts.compile_cache.key import CacheKey, cache_key
from serving.artifacts.compile_cache.layout import BLOBS, KEYS, KeyPlace
from serving.artifacts.compile_cache.prune import GRACE_S, carry_out, plan_pruning, read_holding
from serving.artifacts.object_store.address import open_store
from serving.artifacts.object_store.store import ObjectStore

from .hosts import Host, facts

DAY_S = 24 * 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> ObjectStore:
    return open_store(str(folder))


def age(folder: Path, days: float, below: str = "") -> None:
    """Makes everything that is there so old."""
    at_s = time.time() - days * DAY_S
    for path in (folder / below).rglob("*"):
        os.utime(path, (at_s, at_s))


def pushed(store: ObjectStore, path: Path, revision: str, *names: str) -> CacheKey:
    host = Host(store, path / revision, cache_key(facts(revision=revision)))
    for name in names:
        host.folder.write(f"jit_{name}-1-cache", zlib.compress(name.encode() * 1000))
    host.push()
    return host.key


def test_unused_key_goes_and_the_bytes_that_another_one_names_stay(
    store: ObjectStore, folder: Path, tmp_path: Path
) -> None:
    old = pushed(store, tmp_path, "r1", "shared", "old")
    age(folder, 40)
    new = pushed(store, tmp_path, "r2", "shared", "new")
    pruning = plan_pruning(read_holding(store), time.time(), 30 * DAY_S, None)
    assert [key.place.digest for key in pruning.keys] == [old.digest]
    assert len(pruning.blobs) == 1
    carry_out(store, pruning)
    assert len(store.list(BLOBS)) == 2
    assert Host(store, tmp_path / "fresh", new).pull().num_fetched == 2
    assert store.list(KeyPlace(old.family, old.digest).folder) == []


def test_bound_in_bytes_takes_the_longest_unused_and_never_the_last(
    store: ObjectStore, folder: Path, tmp_path: Path
) -> None:
    keys = []
    for number, days in enumerate((30, 20, 10)):
        keys.append(pushed(store, tmp_path, f"r{number}", f"p{number}"))
        age(folder, days, f"{KEYS}/{keys[-1].family}/{keys[-1].digest}")
    holding = read_holding(store)
    assert [key.place.digest for key in holding.keys] == [key.digest for key in reversed(keys)]

    def gone(max_bytes: int) -> list[str]:
        pruning = plan_pruning(holding, time.time(), None, max_bytes)
        return [key.place.digest for key in pruning.keys]

    assert gone(holding.num_bytes) == []
    assert gone(holding.num_bytes - 1) == [keys[0].digest]
    assert gone(0) == [keys[0].digest, keys[1].digest]


def test_bytes_of_a_push_under_way_stay(store: ObjectStore, tmp_path: Path) -> None:
    pushed(store, tmp_path, "r1", "a")
    unnamed = f"{BLOBS}/00/{'0' * 64}"
    store.put(unnamed, b"on its way")
    holding = read_holding(store)
    assert plan_pruning(holding, time.time(), None, None).blobs == ()
    later = plan_pruning(holding, time.time() + GRACE_S + 60, None, None)
    assert [blob.name for blob in later.blobs] == [unnamed]


def test_key_that_was_pruned_under_a_host_is_pushed_again(
    store: ObjectStore, folder: Path, tmp_path: Path
) -> None:
    key = pushed(store, tmp_path, "r1", "a")
    age(folder, 40)
    pushed(store, tmp_path, "r2", "b")
    carry_out(store, plan_pruning(read_holding(store), time.time(), DAY_S, None))
    assert Host(store, tmp_path / "r1", key).push().num_pushed == 1


def test_commands_list_and_prune(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    old = pushed(store, tmp_path, "r1", "a")
    age(folder, 40)
    new = pushed(store, tmp_path, "r2", "b")
    run = CliRunner()
    listed = run.invoke(programs, ["list", str(folder)])
    assert listed.output.index(new.digest) < listed.output.index(old.digest)
    assert "org/model on v6e 2x4" in listed.output
    dry = run.invoke(programs, ["prune", str(folder), "--unused-days", "30", "--dry-run"])
    assert f"would go: {old.digest}" in dry.output
    assert len(read_holding(store).keys) == 2
    done = run.invoke(programs, ["prune", str(folder), "--unused-days", "30"])
    assert "deleted: 1 keys, 1 blobs" in done.output
    assert [key.place.digest for key in read_holding(store).keys] == [new.digest]


def test_store_that_is_none_is_refused_in_words() -> None:
    result = CliRunner().invoke(programs, ["list", "ftp://x"])
    assert result.exit_code == 2
    assert "no store is reached by ftp://" in result.output
