"""What a batch store promises, in folder and bucket: transactions, leases, tenants, files."""

import itertools
from collections.abc import Callable

import pytest

from serving.gateway.batches.records import (
    Batch,
    BatchCost,
    BatchLease,
    BatchStatus,
    FilePurpose,
    KeyOfBatch,
    LineAnswer,
    StoredFile,
    TokenUsage,
    cancelled,
    finalizing,
    outcome_of,
    validated,
)
from serving.gateway.batches.store import (
    NO_BOUNDS,
    BatchStore,
    Claim,
    FileInUseError,
    LeaseLostError,
    MissingFileError,
    Page,
    StoreFullError,
    TenantBounds,
    TooManyOpenError,
)

from .kept import Kept

MANY = Page(100)
LEASE_S = 30.0
HOUR_S = 3600.0
LIFETIME_S = 1000.0
NO_USAGE = TokenUsage()
FREE = BatchCost()
# When batches are made: a bucket has their order from that, to a millisecond.
_TIMES = itertools.count(0, 0.001)


def stored_file(file_id: str, text: bytes, tenant: str = "a", **changes: object) -> StoredFile:
    values = {"purpose": FilePurpose.BATCH, "created_at_s": 0.0, "expires_at_s": None} | changes
    return StoredFile(file_id, tenant, "in.jsonl", num_bytes=len(text), **values)  # type: ignore[arg-type]


def add_file(
    store: BatchStore, file_id: str = "file-1", text: bytes = b"{}", **changes: object
) -> StoredFile:
    content = store.new_content()
    content.write(text)
    file = stored_file(file_id, text, **changes)  # type: ignore[arg-type]
    try:
        store.add_file(file, content, 1000)
    finally:
        content.discard()
    return file


def add_batch(
    store: BatchStore,
    batch_id: str = "b1",
    tenant: str = "a",
    file_id: str = "file-1",
    bounds: TenantBounds = NO_BOUNDS,
    expires_at_s: float = 24 * HOUR_S,
) -> Batch:
    if store.file(tenant, file_id) is None:
        add_file(store, file_id, tenant=tenant)
    key = KeyOfBatch("", None)
    made_at_s = next(_TIMES)
    batch = Batch(batch_id, tenant, key, "/v1/completions", file_id, "24h", made_at_s, expires_at_s)
    store.add_batch(batch, bounds)
    return batch


def good(line: int, record: bytes, usage: TokenUsage = NO_USAGE) -> LineAnswer:
    return LineAnswer(line, is_failure=False, record=record, usage=usage)


def bad(line: int, record: bytes, usage: TokenUsage = NO_USAGE) -> LineAnswer:
    return LineAnswer(line, is_failure=True, record=record, usage=usage)


def claimed(
    store: BatchStore, owner: str = "gw-1", now_s: float = 0.0, which: Claim = Claim.ANY
) -> BatchLease:
    lease = store.claim(owner, now_s, LEASE_S, which)
    assert lease is not None
    return lease


def begun(store: BatchStore) -> BatchLease:
    """A lease of a batch whose lines are being answered."""
    lease = claimed(store)
    store.change_leased(lease, to(validated, 1000, ()))
    return lease


def to(change: Callable[..., Batch], *values: object) -> Callable[[Batch], Batch]:
    return lambda batch: change(batch, *values, 1.0)


def contents(store: BatchStore, file_id: str) -> bytes:
    with store.open_content("a", file_id) as content:
        return content.read()


def test_file_is_there_whole_or_not_at_all(store: BatchStore, kept: Kept) -> None:
    begun = store.new_content()
    begun.write(b"half")
    assert store.files("a", MANY) == []
    begun.discard()
    file = add_file(store, text=b"line\n")
    assert store.files("a", MANY) == [file]
    assert contents(store, "file-1") == b"line\n"
    assert kept.num_contents() == 1


def test_files_are_their_tenants(store: BatchStore) -> None:
    add_file(store, "file-1", tenant="a")
    assert store.file("b", "file-1") is None
    assert store.files("b", MANY) == []
    assert not store.delete_file("b", "file-1", 0.0)
    assert store.delete_file("a", "file-1", 0.0)
    assert not store.delete_file("a", "file-1", 0.0)
    with pytest.raises(MissingFileError):
        store.open_content("a", "file-1")


def test_tenant_may_keep_so_many_bytes(store: BatchStore, kept: Kept) -> None:
    add_file(store, "file-1", b"x" * 900)
    with pytest.raises(StoreFullError):
        add_file(store, "file-2", b"x" * 101)
    assert kept.num_contents() == 1
    add_file(store, "file-3", b"x" * 100)
    add_file(store, "file-4", b"x" * 900, tenant="b")


def test_lists_go_page_by_page_in_either_order(store: BatchStore) -> None:
    for number in range(5):
        add_batch(store, f"b{number}", file_id=f"file-{number}")
    add_batch(store, "other", tenant="b", file_id="file-b")
    assert [each.batch_id for each in store.batches("a", Page(2))] == ["b4", "b3"]
    assert [each.batch_id for each in store.batches("a", Page(9, "b3"))] == ["b2", "b1", "b0"]
    ids = [each.file_id for each in store.files("a", Page(2, "file-1", is_oldest_first=True))]
    assert ids == ["file-2", "file-3"]
    assert store.files("a", MANY, "batch_output") == []
    assert store.batches("a", Page(9, "nobody's")) == []


def test_batch_needs_a_file_of_its_tenant(store: BatchStore) -> None:
    add_file(store, "file-1", tenant="b")
    key = KeyOfBatch("", None)
    batch = Batch("b1", "a", key, "/v1/completions", "file-1", "24h", 0.0, HOUR_S)
    with pytest.raises(MissingFileError):
        store.add_batch(batch)
    assert store.batches("a", MANY) == []


def test_tenant_may_have_so_many_batches_that_have_not_ended(store: BatchStore) -> None:
    bounds = TenantBounds(max_open_batches=2)
    for number in range(2):
        add_batch(store, f"b{number}", bounds=bounds)
    with pytest.raises(TooManyOpenError):
        add_batch(store, "b2", bounds=bounds)
    assert len(store.batches("a", MANY)) == len(store.open_batches(10)) == 2
    add_batch(store, "other", tenant="b", file_id="file-b", bounds=bounds)
    lease = claimed(store)
    store.end(lease, [], lambda batch: batch.enter(BatchStatus.COMPLETED, 3.0))
    add_batch(store, "b2", bounds=bounds)
    with pytest.raises(TooManyOpenError):
        add_batch(store, "b3", bounds=bounds)


def test_tenant_whose_answers_are_more_than_its_room_makes_no_batch(store: BatchStore) -> None:
    add_batch(store)
    content = store.new_content()
    content.write(b"x" * 100)
    out = stored_file("file-out", b"x" * 100, purpose=FilePurpose.BATCH_OUTPUT)
    store.end(claimed(store), [(out, content)], lambda each: each.enter(BatchStatus.COMPLETED, 3.0))
    content.discard()
    with pytest.raises(StoreFullError) as refused:
        add_batch(store, "b2", bounds=TenantBounds(max_bytes=101))
    assert (refused.value.num_bytes, refused.value.max_bytes) == (102, 101)
    assert [each.batch_id for each in store.batches("a", MANY)] == ["b1"]
    add_batch(store, "b2", bounds=TenantBounds(max_bytes=102))
    add_batch(store, "b3", "b", "file-b", TenantBounds(max_bytes=101))


def test_file_of_a_batch_that_runs_stays(store: BatchStore) -> None:
    add_file(store, "file-1", expires_at_s=10.0)
    add_batch(store)
    with pytest.raises(FileInUseError, match="b1"):
        store.delete_file("a", "file-1", 0.0)
    assert store.sweep(11.0, LIFETIME_S).file_ids == []
    assert contents(store, "file-1") == b"{}"
    lease = claimed(store)
    store.change("a", "b1", to(cancelled))
    store.end(lease, [], lambda batch: batch.enter(outcome_of(batch), 2.0))
    assert store.sweep(9.0, LIFETIME_S).file_ids == []
    assert store.sweep(11.0, LIFETIME_S).file_ids == ["file-1"]
    assert store.file("a", "file-1") is None


def free(batch: Batch) -> Batch:
    return cancelled(batch, 1.0, is_free=True)


def test_batch_that_nobody_has_read_is_cancelled_at_once(store: BatchStore) -> None:
    add_batch(store)
    ended = store.change_free("a", "b1", 0.0, free)
    assert ended is not None
    assert list(ended.entered) == ["cancelling", "cancelled"]
    assert store.batch("a", "b1") == ended
    assert store.open_batches(10) == []
    assert store.claim("gw-1", 1.0, LEASE_S) is None
    assert store.delete_file("a", "file-1", 1.0)
    with pytest.raises(ValueError, match="it is cancelled"):
        store.change_free("a", "b1", 0.0, free)
    assert store.change_free("b", "b1", 0.0, free) is None


def test_batch_that_somebody_has_is_not_free(store: BatchStore) -> None:
    batch = add_batch(store)
    lease = claimed(store)
    assert store.change_free("a", "b1", LEASE_S - 1, free) is None
    assert store.batch("a", "b1") == batch
    store.change_leased(lease, to(validated, 2, ()))
    store.add_answers(lease, [good(1, b"one")])
    store.release(lease)
    changed = store.change_free("a", "b1", LEASE_S - 1, free)
    assert changed is not None
    assert changed.status is BatchStatus.CANCELLING  # what was answered is written by its owner
    assert store.answered_lines("b1") == {1}


def test_batch_has_one_owner_at_a_time(store: BatchStore) -> None:
    add_batch(store)
    first = claimed(store, "gw-1", now_s=0.0)
    assert store.claim("gw-2", LEASE_S - 1, LEASE_S) is None
    store.renew(first, LEASE_S - 1, LEASE_S, FREE)
    assert store.claim("gw-2", LEASE_S + 1, LEASE_S) is None
    second = claimed(store, "gw-2", 2 * LEASE_S)
    assert second.term == first.term + 1
    for call in (
        lambda: store.renew(first, 2 * LEASE_S, LEASE_S, FREE),
        lambda: store.change_leased(first, to(validated, 1, ())),
        lambda: store.add_answers(first, [good(1, b"late")]),
        lambda: store.end(first, [], to(finalizing)),
    ):
        with pytest.raises(LeaseLostError):
            call()
    store.release(first)
    assert store.claim("gw-3", 2 * LEASE_S + 1, LEASE_S) is None
    assert store.answered_lines("b1") == set()
    store.release(second)
    claimed(store, "gw-3", 2 * LEASE_S + 1)


def test_owner_that_comes_back_has_no_old_rights(store: BatchStore) -> None:
    add_batch(store)
    first = claimed(store, "gw-1")
    claimed(store, "gw-1", LEASE_S)
    with pytest.raises(LeaseLostError):
        store.renew(first, LEASE_S, LEASE_S, FREE)


def test_tenant_with_the_fewest_batches_at_work_is_next(store: BatchStore) -> None:
    for number in range(3):
        add_batch(store, f"a{number}")
    add_batch(store, "b0", tenant="b", file_id="file-b")
    assert [claimed(store).batch_id for _ in range(4)] == ["a0", "b0", "a1", "a2"]


def test_batch_whose_window_is_over_first_is_next_of_a_tenants(store: BatchStore) -> None:
    for number, hours in enumerate((3, 1, 2)):
        add_batch(store, f"a{number}", expires_at_s=hours * HOUR_S)
    add_batch(store, "b0", "b", "file-b", expires_at_s=9 * HOUR_S)
    assert [claimed(store).batch_id for _ in range(4)] == ["a1", "b0", "a2", "a0"]


def test_tenant_is_new_while_nobody_has_a_batch_of_it(store: BatchStore, kept: Kept) -> None:
    for number in range(2):
        add_batch(store, f"a{number}")
        add_batch(store, f"b{number}", "b", "file-b")
    lease = claimed(store)
    assert lease.batch_id == "a0"
    assert claimed(store, which=Claim.OF_NEW_TENANT).batch_id == "b0"
    assert store.claim("gw-1", 0.0, LEASE_S, Claim.OF_NEW_TENANT) is None
    # Also of a lease that is lengthened, and though the next one is more urgent.
    add_batch(store, "urgent", expires_at_s=HOUR_S)
    store.renew(lease, LEASE_S - 1, LEASE_S, FREE)
    assert claimed(store, now_s=LEASE_S + 1, which=Claim.OF_NEW_TENANT).batch_id == "b0"
    assert store.claim("gw-1", LEASE_S + 1, LEASE_S, Claim.OF_NEW_TENANT) is None
    store.release(lease)
    assert claimed(store, now_s=LEASE_S + 1, which=Claim.OF_NEW_TENANT).batch_id == "urgent"


def test_batch_without_lines_to_ask_is_to_be_read_or_ended(store: BatchStore) -> None:
    def claim(now_s: float = 0.0) -> BatchLease | None:
        return store.claim("gw-1", now_s, LEASE_S, Claim.WITHOUT_LINES)

    add_batch(store)
    lease = claim()  # it is not read yet
    assert lease is not None
    store.change_leased(lease, to(validated, 1, ()))
    store.release(lease)
    assert claim() is None
    assert claim(24 * HOUR_S) is not None  # its window is over
    later_s = 25 * HOUR_S
    assert claim(later_s) is not None
    add_batch(store, "b2", expires_at_s=99 * HOUR_S)
    lease = claimed(store, now_s=later_s)
    store.change_leased(lease, to(validated, 1, ()))
    store.release(lease)
    assert claim(later_s) is None
    store.change("a", "b2", to(cancelled))
    lease = claim(later_s)
    assert lease is not None
    assert lease.batch_id == "b2"


def test_batch_whose_lines_are_all_answered_is_to_be_ended(store: BatchStore) -> None:
    add_batch(store)
    lease = claimed(store)
    store.change_leased(lease, to(validated, 1, ()))
    store.add_answers(lease, [good(1, b"one")])
    store.release(lease)
    assert store.claim("gw-2", 0.0, LEASE_S, Claim.WITHOUT_LINES) is not None


def test_open_batches_are_those_of_all_tenants_that_have_not_ended(store: BatchStore) -> None:
    for number in range(3):
        add_batch(store, f"a{number}")
    add_batch(store, "b0", tenant="b", file_id="file-b")
    lease = claimed(store)
    store.end(lease, [], lambda batch: batch.enter(BatchStatus.COMPLETED, 3.0))
    assert [each.batch_id for each in store.open_batches(10)] == ["a1", "b0", "a2"]


def test_tenant_with_many_open_batches_hides_none_of_others(store: BatchStore) -> None:
    for number in range(4):
        add_batch(store, f"a{number}", expires_at_s=(9 - number) * HOUR_S)
    add_batch(store, "b0", "b", "file-b", expires_at_s=20 * HOUR_S)
    assert [each.batch_id for each in store.open_batches(3)] == ["a3", "b0", "a2"]


def test_line_keeps_its_first_answer_and_is_counted_once(store: BatchStore) -> None:
    add_batch(store)
    lease = begun(store)
    usage = TokenUsage(5, 1, 2)
    store.add_answers(lease, [good(1, b"one", usage), bad(2, b"two")])
    batch = store.add_answers(lease, [bad(1, b"again", usage)])
    assert (batch.num_completed, batch.num_failed, batch.usage) == (1, 1, usage)
    assert store.answered_lines("b1") == {1, 2}
    assert list(store.answers("b1")) == [good(1, b"one"), bad(2, b"two")]
    assert store.batch("a", "b1") == batch


def test_answer_that_comes_when_files_are_written_is_dropped(store: BatchStore) -> None:
    add_batch(store)
    lease = begun(store)
    store.add_answers(lease, [good(1, b"one")])
    before = store.change("a", "b1", to(finalizing))
    assert store.add_answers(lease, [good(2, b"late")]) == before
    assert store.answered_lines("b1") == {1}


def test_answer_that_was_there_when_the_batch_was_cancelled_is_kept(store: BatchStore) -> None:
    add_batch(store)
    lease = begun(store)
    store.change("a", "b1", to(cancelled))
    assert store.add_answers(lease, [good(1, b"one")]).num_completed == 1
    assert store.answered_lines("b1") == {1}


def test_many_answers_are_read_in_order(store: BatchStore) -> None:
    add_batch(store)
    lease = begun(store)
    for line in reversed(range(1, 1000)):
        store.add_answers(lease, [good(line, b"%d" % line)])
    lines = [int(each.record) for each in store.answers("b1")]
    assert lines == list(range(1, 1000))


def test_batch_ends_with_its_files_or_not_at_all(store: BatchStore, kept: Kept) -> None:
    add_batch(store)
    lease = begun(store)
    store.add_answers(lease, [good(1, b"one")])
    content = store.new_content()
    content.write(b"one\n")
    out = stored_file("file-out", b"one\n", purpose=FilePurpose.BATCH_OUTPUT)

    def broken(batch: Batch) -> Batch:
        raise ValueError("a crash")

    with pytest.raises(ValueError, match="a crash"):
        store.end(lease, [(out, content)], broken)
    content.discard()
    assert store.file("a", "file-out") is None
    assert store.answered_lines("b1") == {1}
    assert kept.num_contents() == 1
    content = store.new_content()
    content.write(b"one\n")
    ended = store.end(lease, [(out, content)], lambda each: each.enter(BatchStatus.COMPLETED, 3.0))
    content.discard()
    assert ended.has_ended
    assert contents(store, "file-out") == b"one\n"
    assert store.answered_lines("b1") == set()
    assert store.claim("gw-2", 1e9, LEASE_S) is None


def test_another_gateway_sees_what_was_written(store: BatchStore, kept: Kept) -> None:
    add_batch(store)
    lease = begun(store)
    other = kept.open()
    assert other.batch("a", "b1") == store.batch("a", "b1")
    assert other.claim("gw-2", 1.0, LEASE_S) is None
    other.add_answers(lease, [good(1, b"one")])
    other.close()
    assert store.answered_lines("b1") == {1}
