"""What is the bucket's own: crashes between two objects, writers that meet, lost answers."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.artifacts.object_store.store import (
    ConflictError,
    StoreError,
    VersionedObject,
    VersionedStore,
)
from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.answers import in_order, packed
from serving.gateway.batches.bucket.documents import Document, Documents
from serving.gateway.batches.bucket.store import BucketBatchStore
from serving.gateway.batches.bucket.sweeps import ORPHAN_S
from serving.gateway.batches.records import (
    Batch,
    BatchCost,
    BatchLease,
    BatchStatus,
    FilePurpose,
    KeyOfBatch,
    LineAnswer,
    cancelled,
    validated,
)
from serving.gateway.batches.store import (
    BatchStore,
    Claim,
    FileInUseError,
    LeaseLostError,
    MissingFileError,
    StoreFullError,
    TenantBounds,
    TooManyOpenError,
)
from tests.artifacts.object_store.memory_store import MemoryStore
from tests.artifacts.object_store.servers import bucket_at, strict_bucket
from tests.artifacts.object_store.strict_server import StrictBucket

from .kept import KeptAtServer, KeptInBucket
from .lanes import Answering, begin, chats, ended, gateway_in, records
from .test_batch_stores import (
    FREE,
    HOUR_S,
    LEASE_S,
    LIFETIME_S,
    MANY,
    add_batch,
    add_file,
    begun,
    claimed,
    contents,
    good,
    stored_file,
    to,
)
from .test_job import NUM_LINES, World, assert_each_line_once

__all__ = ["strict_bucket"]

LATER_S, FOR_EVER_S = 1e6, 1e12
assert LATER_S > ORPHAN_S


@pytest.fixture(
    params=["memory", *(pytest.param(kind, marks=pytest.mark.process) for kind in ("s3", "gs"))]
)
def careful_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> VersionedStore:
    """Buckets that decide and write at once."""
    if request.param == "memory":
        return MemoryStore()
    url = request.getfixturevalue("strict_bucket").url
    return bucket_at(url, request.param, monkeypatch)


class GatewayDiedError(BaseException):
    """The process that was writing is gone."""


class _Number(Document, frozen=True, kw_only=True):
    value: int = 0


def dying_at(bucket: MemoryStore, point: int) -> Counter[str]:
    """Lets a bucket's writer die before its first, second, ... change, or right after it.

    Returns what counts the points that were passed.
    """
    passed: Counter[str] = Counter()

    def interrupt(_call: str, _name: str) -> None:
        if passed["points"] == point:
            raise GatewayDiedError
        passed["points"] += 1

    bucket.interrupt = interrupt
    return passed


def alive(bucket: MemoryStore) -> None:
    bucket.interrupt = lambda _call, _name: None


def each_death(prepare: Callable[[BatchStore], Any], act: Callable[..., Any]) -> Iterator[Any]:
    """Yields a bucket and what was prepared, after a death at each point of an act in turn."""
    point = 0
    while True:
        kept = KeptInBucket()
        kept.bucket.clock = lambda: 0.0
        store = kept.open()
        prepared = prepare(store)
        passed = dying_at(kept.bucket, point)
        is_whole = True
        try:
            act(store, prepared)
        except GatewayDiedError:
            is_whole = False
        alive(kept.bucket)
        store.close()
        yield kept, prepared, is_whole
        if is_whole:
            assert passed["points"] > 2, "it changed nothing"
            return
        point += 1


def left_in(kept: KeptInBucket) -> set[str]:
    """The kinds of objects that are there when all has been looked through that is old."""
    store = kept.open()
    store.sweep(LATER_S, FOR_EVER_S)
    store.close()
    return {name.partition("/")[0] for name in kept.bucket.objects} - {"orphans-looked-for"}


def test_upload_that_dies_leaves_a_file_or_nothing() -> None:
    for kept, _, is_whole in each_death(lambda _: None, lambda store, _: add_file(store)):
        store = kept.open()
        files = store.files("a", MANY)
        assert len(files) == 1 or not is_whole
        for file in files:
            assert contents(store, file.file_id) == b"{}"
        if not files:
            assert left_in(kept) == set()
        store.close()


def test_batch_that_was_not_made_whole_is_run_by_nobody() -> None:
    """And one that was made whole is, though whoever made it heard nothing."""
    for kept, _, is_whole in each_death(add_file, lambda store, _: add_batch(store)):
        store = kept.open()
        listed = store.batches("a", MANY)
        assert len(listed) == 1 or not is_whole
        lease = store.claim("gw-2", 1.0, LEASE_S)
        assert (lease is not None) == bool(listed)
        if not listed:
            assert store.claim("gw-2", HOUR_S, LEASE_S) is None
            assert left_in(kept) == {"contents", "tenants"}
            assert store.delete_file("a", "file-1", 0.0)
        store.close()


def _ending(store: BatchStore) -> BatchLease:
    add_batch(store)
    lease = begun(store)
    store.add_answers(lease, [good(1, b"one")])
    return lease


def _end(store: BatchStore, lease: BatchLease, file_id: str = "file-out") -> None:
    content = store.new_content()
    content.write(b"one\n")
    out = stored_file(file_id, b"one\n", purpose=FilePurpose.BATCH_OUTPUT)
    store.end(
        lease,
        [(out, content)],
        lambda batch: replace(batch.enter(BatchStatus.COMPLETED, 3.0), output_file_id=file_id),
    )


def test_end_that_dies_has_ended_the_batch_with_its_file_or_not_at_all() -> None:
    for kept, _, is_whole in each_death(_ending, _end):
        store = kept.open()
        batch = store.batch("a", "b1")
        assert batch is not None
        assert batch.has_ended or not is_whole
        assert (store.file("a", "file-out") is not None) == batch.has_ended
        if batch.has_ended:
            assert contents(store, "file-out") == b"one\n"
            assert store.claim("gw-2", LATER_S, LEASE_S) is None
        else:
            assert store.files("a", MANY, FilePurpose.BATCH_OUTPUT) == []
            # The next owner ends it, and of the first attempt nothing is left.
            lease = store.claim("gw-2", LATER_S, LEASE_S)
            assert lease is not None
            assert store.answered_lines("b1") == {1}
            _end(store, lease, "file-again")
            assert store.file("a", "file-out") is None
            assert contents(store, "file-again") == b"one\n"
        assert len(store.files("a", MANY)) == 2
        assert left_in(kept) == {"contents", "tenants", "batches"}
        assert kept.num_contents() == 2
        assert [each.name for each in kept.bucket.list(names.BATCHES)] == [names.head_name("b1")]
        store.close()


def test_answers_that_were_written_when_their_owner_died_count_once_or_not() -> None:
    def answer(store: BatchStore, lease: BatchLease) -> None:
        store.add_answers(lease, [good(2, b"two"), good(3, b"three")])

    for kept, _, _ in each_death(_ending, answer):
        store = kept.open()
        batch = store.batch("a", "b1")
        assert batch is not None
        lines = store.answered_lines("b1")
        assert lines in ({1}, {1, 2, 3})
        assert batch.num_completed == len(lines)
        assert {each.line for each in store.answers("b1")} == lines
        lease = claimed(store, "gw-2", LATER_S)
        after = store.add_answers(lease, [good(2, b"again"), good(4, b"four")])
        assert after.num_completed == len(lines | {2, 4})
        records = {each.line: each.record for each in store.answers("b1")}
        assert records[2] == (b"two" if 2 in lines else b"again")
        store.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 80), st.integers(0, 80))
def test_job_whose_gateway_dies_twice_answers_each_line_once(first: int, second: int) -> None:
    kept = KeptInBucket()
    world = World(kept)

    async def carried() -> None:
        for point in (first, second):
            dying_at(kept.bucket, point)
            with contextlib.suppress(BaseExceptionGroup, GatewayDiedError):
                lease = world.claim(f"gw-{point}")
                if lease is not None:
                    await world.carry(lease)
            alive(kept.bucket)
            world.now_s += 2 * LEASE_S
        await world.finish()

    asyncio.run(carried())
    assert world.batch.status is BatchStatus.COMPLETED
    assert_each_line_once(world, NUM_LINES)
    world.store.close()


def test_batch_that_ended_over_a_death_is_settled_by_who_looks_for_work() -> None:
    kept = KeptInBucket()
    store = kept.open()
    lease = _ending(store)

    def interrupt(_call: str, name: str) -> None:
        if name.startswith(names.OPEN):
            raise GatewayDiedError

    kept.bucket.interrupt = interrupt
    with pytest.raises(GatewayDiedError):
        _end(store, lease)
    alive(kept.bucket)
    assert len(kept.bucket.list(names.OPEN)) == 1
    other = kept.open()
    assert other.claim("gw-2", 1.0, LEASE_S) is None
    assert kept.bucket.list(names.OPEN) == []
    store.close()
    other.close()


def test_batch_that_is_cancelled_over_a_death_is_settled_by_who_looks_for_work() -> None:
    def cancel(store: BatchStore, _: Any) -> None:
        store.change_free("a", "b1", 0.0, lambda each: cancelled(each, 1.0, is_free=True))

    for kept, _, is_whole in each_death(add_batch, cancel):
        store = kept.open()
        batch = store.batch("a", "b1")
        assert batch is not None
        assert batch.has_ended or not is_whole
        assert (store.claim("gw-2", 1.0, LEASE_S) is None) == batch.has_ended
        if batch.has_ended:
            assert kept.bucket.list(names.OPEN) == []
            assert store.delete_file("a", "file-1", 1.0)
        store.close()


# -- writers that meet --


def test_many_change_a_document_and_every_change_counts(careful_store: VersionedStore) -> None:
    def add(_: int) -> None:
        Documents(careful_store, _Number).change(
            "number", lambda found: _Number(value=(found or _Number()).value + 1)
        )

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(24)))
    found = Documents(careful_store, _Number).read("number")
    assert found is not None
    assert found.value == 24


def test_tenants_bound_holds_for_uploads_at_once() -> None:
    kept = KeptInBucket()
    stores = [kept.open() for _ in range(4)]

    def upload(number: int) -> bool:
        try:
            add_file(stores[number % 4], f"file-{number}", b"x" * 300)
        except StoreFullError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(upload, range(12))).count(True) == 3
    assert kept.num_contents() == 3
    for store in stores:
        store.close()


def test_file_for_which_there_is_no_room_is_not_uploaded() -> None:
    kept = KeptInBucket()
    store = kept.open()
    with pytest.raises(StoreFullError):
        add_file(store, text=b"x" * 1001)
    assert kept.bucket.num_writes == {}
    store.close()


def test_of_gateways_that_claim_at_once_one_gets_each_batch() -> None:
    kept = KeptInBucket()
    stores = [kept.open() for _ in range(6)]
    for number in range(3):
        add_batch(stores[0], f"b{number}")
    begin = threading.Barrier(6)

    def claim(number: int) -> str | None:
        begin.wait()
        lease = stores[number].claim(f"gw-{number}", 1.0, LEASE_S)
        return None if lease is None else lease.batch_id

    with ThreadPoolExecutor(6) as pool:
        won = [each for each in pool.map(claim, range(6)) if each is not None]
    assert sorted(won) == ["b0", "b1", "b2"]
    for store in stores:
        store.close()


def test_batch_is_made_of_a_file_or_the_file_is_deleted() -> None:
    """Whichever comes first: a batch never has a file that is not there."""
    for _ in range(20):
        kept = KeptInBucket()
        first, second = kept.open(), kept.open()
        add_file(first)
        begin = threading.Barrier(2)

        def delete(store: BatchStore = first, begin: threading.Barrier = begin) -> bool:
            begin.wait()
            try:
                return store.delete_file("a", "file-1", 0.0)
            except FileInUseError:
                return False

        def make(store: BatchStore = second, begin: threading.Barrier = begin) -> bool:
            begin.wait()
            key = KeyOfBatch("", None)
            try:
                store.add_batch(Batch("b1", "a", key, "/v1/x", "file-1", "24h", 0.0, HOUR_S))
            except MissingFileError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            deleted, made = pool.submit(delete), pool.submit(make)
            assert deleted.result() != made.result()
        assert (first.file("a", "file-1") is None) == deleted.result()
        first.close()
        second.close()


def losing_one(bucket: MemoryStore, folder: str, meanwhile: Callable[[], Any]) -> list[str]:
    """Has a bucket lose its answer to the next write below a folder, before which others write.

    The client sends that write again, which finds an object that is not the one it is to replace.
    Returns the names of the objects whose answers were lost.
    """
    lost: list[str] = []
    num_calls = Counter[str]()

    def interrupt(call: str, name: str) -> None:
        if call == "write_if" and name.startswith(folder) and not lost:
            num_calls[name] += 1
            if num_calls[name] == 2:  # it is written
                lost.append(name)
                meanwhile()
                raise ConflictError(name)

    bucket.interrupt = interrupt
    return lost


def test_file_whose_answer_is_lost_comes_once_though_others_write() -> None:
    kept = KeptInBucket()
    first, second = kept.open(), kept.open()
    lost = losing_one(kept.bucket, names.TENANTS, lambda: add_file(second, "file-2"))
    add_file(first, "file-1")
    assert lost
    assert {each.file_id for each in first.files("a", MANY)} == {"file-1", "file-2"}
    assert len(first.files("a", MANY)) == 2
    assert first.delete_file("a", "file-1", 0.0)
    assert [each.file_id for each in first.files("a", MANY)] == ["file-2"]
    first.close()
    second.close()


def test_file_that_is_deleted_before_its_upload_is_told_of_stays_deleted() -> None:
    kept = KeptInBucket()
    first, second = kept.open(), kept.open()
    lost = losing_one(kept.bucket, names.TENANTS, lambda: second.delete_file("a", "file-1", 0.0))
    add_file(first, "file-1")
    assert lost
    assert first.files("a", MANY) == []
    first.close()
    second.close()


def test_deletion_whose_answer_is_lost_is_one_though_others_write() -> None:
    kept = KeptInBucket()
    first, second = kept.open(), kept.open()
    add_file(first, "file-1")
    lost = losing_one(kept.bucket, names.TENANTS, lambda: add_file(second, "file-2"))
    assert first.delete_file("a", "file-1", 0.0)
    assert lost
    first.close()
    second.close()


def test_batch_whose_answer_is_lost_comes_once_though_others_write() -> None:
    kept = KeptInBucket()
    first, second = kept.open(), kept.open()
    add_file(first, "file-1")
    lost = losing_one(kept.bucket, names.TENANTS, lambda: add_file(second, "file-2"))
    add_batch(first)
    assert lost
    assert [each.batch_id for each in first.batches("a", MANY)] == ["b1"]
    first.close()
    second.close()


@pytest.mark.parametrize("deadly", [1, 2])  # before the catalog is written, and after it
def test_batch_of_which_it_is_not_known_whether_it_was_made_is_made_once(deadly: int) -> None:
    kept = KeptInBucket()
    store = kept.open()
    add_file(store)
    calls: list[str] = []

    def interrupt(call: str, name: str) -> None:
        if name.startswith(names.TENANTS):
            calls.append(call)
            if len(calls) == deadly:
                raise StoreError("no answer")

    kept.bucket.interrupt = interrupt
    batch = add_batch(store)
    alive(kept.bucket)
    assert calls == ["write_if"] * (3 if deadly == 1 else 2)
    assert store.batches("a", MANY) == [batch]
    assert len(kept.bucket.list(names.OPEN)) == 1
    assert claimed(store).batch_id == "b1"
    store.close()


def test_claim_whose_answer_is_lost_is_the_claimers_though_others_write() -> None:
    kept = KeptInBucket()
    first, second = kept.open(), kept.open()
    add_batch(first)
    lost = losing_one(kept.bucket, "batches/b1", lambda: second.change("a", "b1", to(cancelled)))
    lease = claimed(first)
    assert lost
    assert lease.term == 1
    assert first.renew(lease, 1.0, LEASE_S, FREE).status is BatchStatus.CANCELLING
    first.close()
    second.close()


def test_cost_and_answers_whose_answer_is_lost_count_once_though_others_write() -> None:
    kept = KeptInBucket()
    first, second = kept.open(), kept.open()
    add_batch(first)
    lease = begun(first)
    notes = iter(("first", "second", "third"))

    def note() -> None:
        text = next(notes)
        second.change("a", "b1", lambda batch: replace(batch, metadata={"note": text}))

    lost = losing_one(kept.bucket, "batches/b1", note)
    assert first.renew(lease, 1.0, LEASE_S, BatchCost(10, 1.0)).cost == BatchCost(10, 1.0)
    assert lost
    for number in (1, 2):
        lost = losing_one(kept.bucket, "batches/b1/head", note)
        batch = first.add_answers(lease, [good(number, b"%d" % number)])
        assert lost
        assert (batch.num_completed, batch.cost) == (number, BatchCost(10, 1.0))
    assert [each.record for each in first.answers("b1")] == [b"1", b"2"]
    assert batch.metadata == {"note": "third"}
    first.close()
    second.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_answers_that_a_bucket_loses_are_no_conflict(
    kind: str, strict_bucket: StrictBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch's whole life, with every second answer of the bucket lost."""
    monkeypatch.setattr(strict_bucket, "lose_every", 2)
    store = BucketBatchStore(bucket_at(strict_bucket.url, kind, monkeypatch), 0.0)
    lease = _ending(store)
    before = strict_bucket.num_lost
    for line in range(2, 6):
        store.add_answers(lease, [good(line, b"%d" % line)])
        store.renew(lease, 100.0 * line, LEASE_S, BatchCost(10, 1.0))
    assert strict_bucket.num_lost > before
    batch = store.batch("a", "b1")
    assert batch is not None
    assert (batch.num_completed, batch.cost) == (5, BatchCost(40, 4.0))
    _end(store, lease)
    assert contents(store, "file-out") == b"one\n"
    assert store.claim("gw-2", LATER_S, LEASE_S) is None
    store.close()


@pytest.mark.process
async def test_bucket_that_takes_one_write_a_second_is_enough_for_a_batch(
    strict_bucket: StrictBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the upload to the answers, by OpenAI's client, at the pace of production."""
    kept = KeptAtServer(bucket_at(strict_bucket.url, "gs", monkeypatch))
    monkeypatch.setattr(strict_bucket, "writes_apart_s", 1.0)
    async with gateway_in(kept, Answering()) as gateway, gateway.client() as client:
        batch = await ended(client, await begin(client, chats(300)))
        lines = await records(client, batch.output_file_id)
    assert batch.status == "completed"
    assert {each["custom_id"] for each in lines} == {f"line-{number}" for number in range(300)}


def test_document_that_is_never_ours_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gateway.batches.bucket.documents._PATIENCE_S", 0.0)
    bucket = MemoryStore()

    def interrupt(call: str, name: str) -> None:
        if call == "write_if":
            raise ConflictError(name)

    bucket.interrupt = interrupt
    with pytest.raises(ConflictError):
        Documents(bucket, _Number).change("number", lambda _: _Number(value=1))


def test_document_that_is_not_ours_is_a_store_that_fails() -> None:
    bucket = MemoryStore()
    bucket.put("number", b"<html>")
    with pytest.raises(StoreError, match="not what was written"):
        Documents(bucket, _Number).read("number")


def test_head_of_a_newer_build_stops_no_other_batch(caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptInBucket()
    store = kept.open()
    add_batch(store, "b0")
    add_batch(store, "b1")
    head = names.head_name("b0")
    ours = kept.bucket.get(head)
    kept.bucket.put(head, ours.replace(b'"validating"', b'"waiting_for_a_newer_build"'))
    assert [each.batch_id for each in store.open_batches(10)] == ["b1"]
    lease = claimed(store)
    assert lease.batch_id == "b1"
    assert store.claim("gw-1", 1.0, LEASE_S) is None
    assert [each.message.split(" reason")[0] for each in caplog.records] == [
        "batch_unreadable batch=b0"
    ]
    kept.bucket.put(head, ours)
    store.renew(lease, HOUR_S, LEASE_S, FREE)
    assert claimed(store, now_s=HOUR_S).batch_id == "b0"
    store.close()


def test_writes_of_which_nothing_is_known_end_the_lease() -> None:
    """The head may have them: a second write under the same number would be another one."""
    kept = KeptInBucket()
    store = kept.open()
    lease = _ending(store)

    def interrupt(call: str, _name: str) -> None:
        if call == "write_if":
            raise StoreError("no answer")

    kept.bucket.interrupt = interrupt
    with pytest.raises(StoreError, match="no answer"):
        store.add_answers(lease, [good(2, b"two")])
    alive(kept.bucket)
    with pytest.raises(LeaseLostError):
        store.add_answers(lease, [good(3, b"three")])
    again = claimed(store, "gw-1", LEASE_S)
    assert store.add_answers(again, [good(2, b"two again")]).num_completed == 2
    records = [each.record for each in store.answers("b1")]
    assert records == [b"one", b"two again"]
    store.close()


def test_batch_that_an_earlier_build_made_is_worked_on_and_leaves_nothing() -> None:
    kept = KeptInBucket()
    store = kept.open()
    batch = add_batch(store)
    (marker,) = kept.bucket.list(names.OPEN)
    kept.bucket.delete(marker.name)
    made_ms = round(batch.created_at_s * 1000)
    kept.bucket.put(f"open/{made_ms:015d}-{names.digest_of('a')}-b1", b"")
    assert [each.batch_id for each in store.open_batches(10)] == ["b1"]
    _end(store, begun(store))
    assert store.claim("gw-1", LATER_S, LEASE_S) is None
    assert kept.bucket.list(names.OPEN) == []
    store.close()


class _CountedReads(MemoryStore):
    num_reads = 0

    def read(self, name: str) -> VersionedObject:
        self.num_reads += 1
        return super().read(name)


def test_batches_that_wait_are_not_read_by_each_look_for_those_without_lines() -> None:
    bucket = _CountedReads()
    store, other = (BucketBatchStore(bucket, write_interval_s=0.0) for _ in range(2))
    for number in range(3):
        add_batch(store, f"b{number}")
        lease = claimed(store, which=Claim.WITHOUT_LINES)
        store.change_leased(lease, to(validated, 9, ()))
        store.release(lease)

    def claim(at: BatchStore, now_s: float) -> BatchLease | None:
        return at.claim("gw-1", now_s, LEASE_S, Claim.WITHOUT_LINES)

    assert claim(other, 1.0) is None
    before = bucket.num_reads
    assert claim(other, 2.0) is None
    assert bucket.num_reads == before
    store.change("a", "b2", to(cancelled))
    assert claim(store, 2.0) is not None
    store.change("a", "b1", to(cancelled))
    assert claim(other, 3.0) is None
    assert claim(other, HOUR_S) is not None  # in the end also one of which the other was told
    store.close()
    other.close()


# -- few writes --


def test_of_a_batch_that_is_refused_nothing_is_written() -> None:
    kept = KeptInBucket()
    store = kept.open()
    add_batch(store)
    before = dict(kept.bucket.num_writes)
    with pytest.raises(TooManyOpenError):
        add_batch(store, "b2", bounds=TenantBounds(max_open_batches=1))
    assert kept.bucket.num_writes == before
    store.close()


def test_lease_that_is_young_is_not_written_again() -> None:
    kept = KeptInBucket()
    store = kept.open()
    add_batch(store)
    lease = claimed(store)
    before = kept.bucket.num_writes[names.head_name("b1")]
    store.renew(lease, 1.0, LEASE_S, FREE)
    assert kept.bucket.num_writes[names.head_name("b1")] == before
    store.renew(lease, LEASE_S / 2, LEASE_S, FREE)
    assert kept.bucket.num_writes[names.head_name("b1")] == before + 1
    assert store.claim("gw-2", LEASE_S + 1, LEASE_S) is None
    store.close()


def test_answers_are_one_write_of_the_head_and_one_object() -> None:
    kept = KeptInBucket()
    store = kept.open()
    add_batch(store)
    lease = begun(store)
    before = dict(kept.bucket.num_writes)
    store.add_answers(lease, [good(line, b"x") for line in range(1, 101)])
    written = Counter(kept.bucket.num_writes) - Counter(before)
    assert written == {
        names.head_name("b1"): 1,
        names.answers_name("b1", lease.term, 1): 1,
    }
    store.close()


def test_content_of_a_deleted_file_can_be_read_to_its_end() -> None:
    kept = KeptInBucket()
    store = kept.open()
    text = bytes(range(256)) * 3
    add_file(store, text=text)
    with store.open_content("a", "file-1") as content:
        assert content.read(10) == text[:10]
        store.delete_file("a", "file-1", 100.0)
        store.sweep(100.0 + HOUR_S / 2, LIFETIME_S)
        assert content.seek(250) == 250
        assert content.read() == text[250:]
    store.sweep(101.0 + HOUR_S, LIFETIME_S)
    assert kept.num_contents() == 0
    store.close()


@pytest.mark.parametrize("batch_id", ["../b1", "a/b", "", "b1/head", "x" * 200, "é"])
def test_id_of_a_client_reaches_no_other_object(batch_id: str) -> None:
    kept = KeptInBucket()
    store = kept.open()
    add_batch(store)
    kept.bucket.put(f"batches/{batch_id}/head", b"not for clients")
    assert store.batch("a", batch_id) is None
    assert store.change("a", batch_id, to(cancelled)) is None
    store.close()


def test_first_answer_of_a_line_counts_of_whichever_kind() -> None:
    objects = [
        packed([LineAnswer(3, is_failure=True, record=b"3"), good(1, b"1")]),
        packed([good(3, b"later"), good(2, b"2")]),
    ]
    assert list(in_order(objects)) == [
        *(good(1, b"1"), good(2, b"2")),
        LineAnswer(3, is_failure=True, record=b"3"),
    ]
