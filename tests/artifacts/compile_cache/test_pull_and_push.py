"""Pulls and pushes over stores that are empty, damaged, slow, refusing or shared. No JAX."""

import itertools
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import zstandard

from serving.artifacts.compile_cache.key import cache_key
from serving.artifacts.compile_cache.layout import (
    BLOBS,
    DamagedManifestError,
    KeyPlace,
    Manifest,
    ProgramEntry,
    blob_name,
    content_digest,
    read_manifest,
    union,
)
from serving.artifacts.compile_cache.local_folder import LocalFolder, is_whole
from serving.artifacts.compile_cache.pull import NUM_FETCHERS, pull
from serving.artifacts.compile_cache.report import TransferOutcome
from serving.artifacts.object_store.address import open_store
from serving.artifacts.object_store.store import ObjectStore

from .hosts import KEY, FailingStore, Host, facts

PLACE = KeyPlace(KEY.family, KEY.digest)


def program(text: str) -> bytes:
    """What stands for a compiled program; compressed, as JAX keeps it."""
    return zlib.compress(text.encode() * 50)


def programs(*names: str) -> dict[str, bytes]:
    return {f"jit_{name}-0123-cache": program(name) for name in names}


def compiled(host: Host, made: Mapping[str, bytes]) -> None:
    for name, data in made.items():
        host.folder.write(name, data)


def held(host: Host) -> dict[str, bytes]:
    return {name: (host.path / name).read_bytes() for name in host.folder.sizes()}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def failing(store: ObjectStore) -> FailingStore:
    return FailingStore(store)


def test_pushed_programs_come_to_another_host(any_store: ObjectStore, tmp_path: Path) -> None:
    first, second = Host(any_store, tmp_path / "1"), Host(any_store, tmp_path / "2")
    compiled(first, programs("a", "b"))
    pushed = first.push()
    assert (pushed.outcome, pushed.num_pushed) == (TransferOutcome.DONE, 2)
    assert any_store.get(PLACE.record) == KEY.record
    pulled = second.pull()
    assert (pulled.outcome, pulled.num_fetched, pulled.num_bytes) == (
        TransferOutcome.DONE,
        2,
        pushed.num_bytes,
    )
    assert held(second) == programs("a", "b")
    # And nothing comes or goes again.
    again = second.pull()
    assert (again.num_present, again.num_fetched, again.num_bytes) == (2, 0, 0)
    assert second.push().outcome == TransferOutcome.NOTHING


def test_same_bytes_under_another_key_are_kept_once(store: ObjectStore, tmp_path: Path) -> None:
    first = Host(store, tmp_path / "1")
    other = Host(store, tmp_path / "2", key=cache_key(facts(topology="4x4")))
    for host in (first, other):
        compiled(host, programs("a"))
    assert first.push().num_bytes > 0
    assert (other.push().num_pushed, len(store.list(BLOBS))) == (1, 1)


def test_new_revision_starts_from_programs_of_the_one_before(
    store: ObjectStore, tmp_path: Path
) -> None:
    first = Host(store, tmp_path / "1")
    compiled(first, programs("a", "b"))
    first.push()
    key = cache_key(facts(revision="r2"))
    second = Host(store, tmp_path / "2", key=key)
    assert second.pull().seed == KEY.digest
    assert held(second) == programs("a", "b")
    # What it was helped to is its own from now on, without a byte sent.
    pushed = second.push()
    assert (pushed.num_pushed, pushed.num_bytes) == (2, 0)
    assert Host(store, tmp_path / "3", key=key).pull().seed is None


@pytest.mark.parametrize("harm", ["truncated", "altered", "missing"])
def test_damaged_program_is_not_used_and_its_place_is_made_good(
    any_store: ObjectStore, tmp_path: Path, harm: str
) -> None:
    first, second, third = (Host(any_store, tmp_path / name) for name in "123")
    compiled(first, programs("a", "b"))
    first.push()
    (name, data), _ = programs("a", "b").items()
    blob = blob_name(content_digest(data))
    if harm == "missing":
        any_store.delete(blob)
    else:
        any_store.put(blob, data[:-4] if harm == "truncated" else b"?" + data[1:])
    assert [each.reason for each in second.pull().damage] == [harm]
    assert set(held(second)) == set(programs("b"))
    compiled(second, {name: data})  # as an engine does, for JAX does not find it
    assert second.push().num_rebuilt == 1
    assert (third.pull().damage, held(third)) == ((), programs("a", "b"))


def test_program_compiled_anew_to_other_bytes_takes_the_place_of_the_damaged(
    store: ObjectStore, tmp_path: Path
) -> None:
    first, second, third = (Host(store, tmp_path / name) for name in "123")
    compiled(first, programs("a"))
    first.push()
    store.put(store.list(BLOBS)[0].name, b"")
    second.pull()
    anew = {name: program("other") for name in programs("a")}
    compiled(second, anew)
    second.push()
    assert third.pull().damage == ()
    assert held(third) == anew


def test_damaged_manifest_names_nothing_and_stops_nobody(
    store: ObjectStore, tmp_path: Path
) -> None:
    first, second = Host(store, tmp_path / "1"), Host(store, tmp_path / "2")
    compiled(first, programs("a"))
    first.push()
    store.put(f"{PLACE.manifests}/9-x.json", b'{"format": 1, "entries"')
    assert second.pull().num_fetched == 1


def test_writers_at_once_leave_the_union(any_store: ObjectStore, tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(6)]
    hosts = [Host(any_store, tmp_path / f"{number}") for number in range(4)]
    for number, host in enumerate(hosts):
        compiled(host, programs(*names[number : number + 3]))
    with ThreadPoolExecutor(len(hosts)) as pool:
        reports = list(pool.map(Host.push, hosts))
    # A late one may find that others have pushed all it has.
    assert {report.outcome for report in reports} <= {TransferOutcome.DONE, TransferOutcome.NOTHING}
    last = Host(any_store, tmp_path / "last")
    assert last.pull().num_known == len(names)
    assert held(last) == programs(*names)


def test_file_that_was_cut_short_here_neither_stays_nor_leaves(
    store: ObjectStore, tmp_path: Path
) -> None:
    host = Host(store, tmp_path / "1")
    (name, data) = next(iter(programs("a").items()))
    compiled(host, {name: data[:-1]})
    pushed = host.push()
    assert (pushed.num_refused, pushed.num_pushed) == (1, 0)
    assert host.pull().num_dropped == 1
    assert held(host) == {}


def test_unpushed_program_of_an_engine_before_stays(store: ObjectStore, tmp_path: Path) -> None:
    host, other = Host(store, tmp_path / "1"), Host(store, tmp_path / "2")
    compiled(host, programs("mine"))
    compiled(other, programs("theirs"))
    other.push()
    host.pull()
    assert held(host) == programs("mine", "theirs")


@pytest.mark.parametrize("call", ["list", "get"])
def test_store_that_refuses_leaves_the_host_as_it_was(
    failing: FailingStore, tmp_path: Path, call: str
) -> None:
    first, second = Host(failing, tmp_path / "1"), Host(failing, tmp_path / "2")
    compiled(first, programs("a"))
    first.push()
    failing.fails = {call}
    pulled = second.pull()
    assert (pulled.outcome, pulled.reason) == (TransferOutcome.UNREACHABLE, f"{call} refused")
    assert held(second) == {}


def test_store_that_ends_in_the_middle_leaves_what_had_come(
    store: ObjectStore, tmp_path: Path
) -> None:
    class EndsAfterOne(FailingStore):
        def get(self, name: str) -> bytes:
            data = super().get(name)
            if name.startswith(BLOBS):
                self.fails = {"get"}
            return data

    first, second = Host(store, tmp_path / "1"), Host(EndsAfterOne(store), tmp_path / "2")
    compiled(first, programs(*(f"p{number}" for number in range(40))))
    first.push()
    pulled = second.pull()
    assert pulled.outcome == TransferOutcome.UNREACHABLE
    assert pulled.reason.endswith("programs left; get refused")
    assert 1 <= pulled.num_fetched == len(held(second)) < 40


@pytest.mark.parametrize("call", ["list", "head", "put", "put manifest"])
def test_push_that_is_cut_short_names_nothing_and_is_made_up_for(
    failing: FailingStore, tmp_path: Path, call: str
) -> None:
    first, second = Host(failing, tmp_path / "1"), Host(failing, tmp_path / "2")
    compiled(first, programs("a", "b"))
    failing.fails = {call}
    assert first.push().outcome == TransferOutcome.UNREACHABLE
    failing.fails = set()
    assert second.pull().outcome == TransferOutcome.NOTHING
    assert first.push().num_pushed == 2
    assert second.pull().num_fetched == 2


def test_pull_without_time_fetches_the_largest_first(store: ObjectStore, tmp_path: Path) -> None:
    first = Host(store, tmp_path / "1")
    made = {f"jit_{n}-0-cache": zlib.compress(bytes(range(256)) * n) for n in range(1, 30)}
    compiled(first, made)
    first.push()
    # Every reading of this clock is a second later; fetches read it once each.
    ticks = itertools.count()
    folder = LocalFolder(tmp_path / "2")
    report = pull(store, PLACE, folder, 20.0, lambda: float(next(ticks)))
    assert report.outcome == TransferOutcome.OUT_OF_TIME
    assert 0 < report.num_fetched < len(made)
    assert f"{len(made) - report.num_fetched} of {len(made)} programs left" in report.reason
    largest_first = sorted(made, key=lambda name: len(made[name]), reverse=True)
    # Whoever is late to read the clock may leave one that is larger than another's.
    assert set(folder.sizes()) <= set(largest_first[: report.num_fetched + NUM_FETCHERS - 1])


def test_store_that_hangs_holds_a_pull_for_its_budget_only(
    store: ObjectStore, tmp_path: Path
) -> None:
    class Hanging(FailingStore):
        def list(self, folder: str) -> list:  # type: ignore[type-arg]
            released.wait()
            return []

    released = Event()
    host = replace(Host(Hanging(store), tmp_path / "1"), budget_s=0.05)
    try:
        report = host.pull()
    finally:
        released.set()
    assert report.outcome == TransferOutcome.OUT_OF_TIME
    assert "did not list its programs in 0.05 s" in report.reason


def test_push_without_time_names_what_it_has_sent(store: ObjectStore, tmp_path: Path) -> None:
    first = replace(Host(store, tmp_path / "1"), budget_s=0.0)
    compiled(first, programs("a"))
    assert (first.push().outcome, first.push().num_pushed) == (TransferOutcome.OUT_OF_TIME, 0)


@pytest.mark.parametrize(
    "name", ["../x-cache", "a/b-cache", ".x-cache", "x", "-cache", "a\n-cache"]
)
def test_manifest_that_names_another_file_is_refused(name: str) -> None:
    manifest = {"format": 1, "writer": "w", "written_at_s": 1.0, "entries": []}
    entry = {"name": name, "digest": "0" * 64, "num_bytes": 1}
    with pytest.raises(DamagedManifestError):
        read_manifest(json.dumps(manifest | {"entries": [entry]}).encode())


def test_union_puts_the_newest_bytes_first() -> None:
    def manifest(at_s: float, digest: str) -> Manifest:
        entry = ProgramEntry(name="jit_a-1-cache", digest=digest * 64, num_bytes=1)
        return Manifest(writer="w", written_at_s=at_s, entries=(entry,))

    known = union([manifest(1.0, "a"), manifest(3.0, "b"), manifest(2.0, "a")])
    assert [entry.digest[0] for entry in known["jit_a-1-cache"]] == ["b", "a"]


def test_whole_streams_are_told_from_others() -> None:
    data = zlib.compress(bytes(range(256)) * 20_000)
    assert is_whole(data)
    assert not any(is_whole(data[:length]) for length in (0, 1, 100, len(data) - 1))
    assert not is_whole(data + b"x")
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 8
    assert not is_whole(bytes(flipped))


def test_whole_zstandard_streams_are_told_from_others() -> None:
    data = zstandard.compress(bytes(range(256)) * 20_000)
    assert is_whole(data)
    assert not any(is_whole(data[:length]) for length in (5, len(data) - 1))
