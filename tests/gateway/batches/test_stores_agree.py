"""The same calls on the folder and on the bucket, in any order: the same comes of them."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from serving.gateway.batches.records import (
    Batch,
    BatchCost,
    BatchLease,
    BatchStatus,
    FilePurpose,
    KeyOfBatch,
    LineAnswer,
    TokenUsage,
    cancelled,
    finalizing,
    outcome_of,
    validated,
)
from serving.gateway.batches.store import BatchStore, Claim, Page, TenantBounds

from .kept import KeptInBucket, KeptInFolder
from .test_batch_stores import LEASE_S, LIFETIME_S, stored_file

# Files and batches are of a tenant; batches of one alone, since who is next among several is only
# nearly the same.
TENANT, OTHER = "a", "b"
MAX_BYTES = 60
BOUNDS = TenantBounds(max_open_batches=3, max_bytes=MAX_BYTES)
NUM_LINES = 12
numbers = st.integers(0, 4)
T = TypeVar("T")


class StoresAgree(RuleBasedStateMachine):
    """Two stores, a clock for both, and what has been leased so far."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores: tuple[BatchStore, BatchStore] = (
            KeptInFolder(Path(self.folder.name)).open(),
            KeptInBucket().open(),
        )
        self.now_s = 1.0
        self.num_made = 0
        self.leases: list[BatchLease] = []
        self.file_ids: list[str] = ["nobody's"]
        self.batch_ids: list[str] = ["nobody's"]
        # Most of what can happen, happens to a batch that runs.
        self.upload(10, TENANT, stays=True)
        self.make(0)
        self.claim("gw-1")
        self.advance(0, validated)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    def both(self, call: Callable[[BatchStore], Any]) -> Any:
        """What came of a call, which has to be the same."""
        outcomes = [_outcome(call, store) for store in self.stores]
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    def _tick(self) -> int:
        self.num_made += 1
        self.now_s += 0.01
        return self.num_made

    @rule(size=st.integers(0, 30), tenant=st.sampled_from([TENANT, OTHER]), stays=st.booleans())
    def upload(self, size: int, tenant: str, stays: bool) -> None:
        number, text = self._tick(), b"x" * size
        until_s = None if stays else self.now_s + 50.0
        file = stored_file(f"file-{number}", text, tenant, expires_at_s=until_s)
        self.file_ids.append(file.file_id)

        def add(store: BatchStore) -> None:
            content = store.new_content()
            content.write(text)
            try:
                store.add_file(file, content, MAX_BYTES)
            finally:
                content.discard()

        self.both(add)

    @rule(number=numbers, tenant=st.sampled_from([TENANT, OTHER]))
    def delete(self, number: int, tenant: str) -> None:
        self.both(lambda store: store.delete_file(tenant, self._file_id(number), self.now_s))

    @rule(number=numbers, tenant=st.sampled_from([TENANT, OTHER]))
    def read(self, number: int, tenant: str) -> None:
        def content(store: BatchStore) -> bytes:
            with store.open_content(tenant, self._file_id(number)) as opened:
                return opened.read()

        self.both(content)

    @rule(number=numbers, window_s=st.sampled_from([1000.0, 500.0]))
    def make(self, number: int, window_s: float = 1000.0) -> None:
        made = self._tick()
        key = KeyOfBatch("", None)
        file_id, at_s = self._file_id(number), self.now_s
        self.batch_ids.append(f"b{made}")
        batch = Batch(f"b{made}", TENANT, key, "/v1/x", file_id, "24h", at_s, at_s + window_s)
        self.both(lambda store: store.add_batch(batch, BOUNDS))

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        now_s = self.now_s
        self.both(
            lambda store: store.change(
                TENANT, _at(self.batch_ids, number), lambda each: cancelled(each, now_s)
            )
        )

    @rule(number=numbers)
    def cancel_free(self, number: int) -> None:
        batch_id, now_s = _at(self.batch_ids, number), self.now_s
        self.both(
            lambda store: store.change_free(
                TENANT, batch_id, now_s, lambda each: cancelled(each, now_s, is_free=True)
            )
        )

    @rule(owner=st.sampled_from(["gw-1", "gw-2"]), which=st.sampled_from(Claim))
    def claim(self, owner: str, which: Claim = Claim.ANY) -> None:
        self._tick()
        kind, lease = self.both(lambda store: store.claim(owner, self.now_s, LEASE_S, which))
        if kind == "came" and lease is not None:
            self.leases.append(lease)

    def _lease(self, number: int) -> BatchLease | None:
        return _at(self.leases, number) if self.leases else None

    def _file_id(self, number: int) -> str:
        return _at(self.file_ids, number)

    @rule(number=numbers, chip_ms=st.integers(0, 2))
    def renew(self, number: int, chip_ms: int) -> None:
        if (lease := self._lease(number)) is not None:
            cost = BatchCost(chip_ms, float(chip_ms))
            self.both(lambda store: store.renew(lease, self.now_s, LEASE_S, cost))

    @rule(number=numbers)
    def release(self, number: int) -> None:
        if (lease := self._lease(number)) is not None:
            self.both(lambda store: store.release(lease))

    @rule(number=numbers, step=st.sampled_from([validated, finalizing]))
    def advance(self, number: int, step: Callable[..., Batch]) -> None:
        if (lease := self._lease(number)) is None:
            return
        now_s = self.now_s
        values = (NUM_LINES, ()) if step is validated else ()
        self.both(lambda store: store.change_leased(lease, lambda each: step(each, *values, now_s)))

    @rule(
        number=numbers,
        lines=st.lists(st.tuples(st.integers(1, NUM_LINES), st.booleans()), max_size=5),
    )
    def answer(self, number: int, lines: list[tuple[int, bool]]) -> None:
        if (lease := self._lease(number)) is None:
            return
        tag = self._tick()
        answers = [
            LineAnswer(line, is_failure, f"{tag} {at}".encode(), TokenUsage(at, 0, 1))
            for at, (line, is_failure) in enumerate(lines)
        ]
        self.both(lambda store: store.add_answers(lease, answers))

    @rule(number=numbers, has_file=st.booleans())
    def end(self, number: int, has_file: bool) -> None:
        if (lease := self._lease(number)) is None:
            return
        tag, now_s = self._tick(), self.now_s
        text = b"answers"
        self.file_ids.append(f"out-{tag}")
        file = stored_file(
            f"out-{tag}",
            text,
            TENANT,
            purpose=FilePurpose.BATCH_OUTPUT,
            expires_at_s=now_s + 60.0,
        )

        def ended(store: BatchStore) -> Batch | None:
            found = store.renew(lease, now_s, LEASE_S, BatchCost())
            if found.has_ended:  # no job ends a batch twice
                return None
            content = store.new_content()
            content.write(text)
            files = [(file, content)] if has_file else []
            try:
                return store.end(lease, files, lambda each: each.enter(_end_of(each), now_s))
            finally:
                content.discard()

        self.both(ended)

    @rule(seconds=st.sampled_from([1.0, 40.0, 2000.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def sweep(self) -> None:
        kind, swept = self.both(
            lambda store: _sorted(store.sweep(self.now_s, LIFETIME_S))  # in any order
        )
        assert kind == "came", swept

    @rule(
        limit=st.integers(1, 4),
        after=st.none() | numbers,
        oldest_first=st.booleans(),
        tenant=st.sampled_from([TENANT, OTHER]),
    )
    def look(self, limit: int, after: int | None, oldest_first: bool, tenant: str) -> None:
        def page(ids: list[str]) -> Page:
            return Page(limit, None if after is None else _at(ids, after), oldest_first)

        self.both(lambda store: store.files(tenant, page(self.file_ids)))
        self.both(lambda store: store.files(tenant, page(self.file_ids), "batch_output"))
        self.both(lambda store: store.batches(tenant, page(self.batch_ids)))
        self.both(lambda store: store.open_batches(limit))

    @rule()
    def look_at_all(self) -> None:
        for lease in self.leases:
            self.both(lambda store, lease=lease: store.batch(TENANT, lease.batch_id))
            self.both(lambda store, lease=lease: store.batch(OTHER, lease.batch_id))
            self.both(lambda store, lease=lease: store.answered_lines(lease.batch_id))
            self.both(lambda store, lease=lease: list(store.answers(lease.batch_id)))


def _at(items: Sequence[T], number: int) -> T:
    """One of them, the later ones for the lower numbers."""
    return items[-1 - number % len(items)]


def _outcome(call: Callable[[BatchStore], Any], store: BatchStore) -> tuple[str, Any]:
    try:
        return "came", call(store)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other store has to raise it too
        return type(error).__name__, str(error)


def _end_of(batch: Batch) -> BatchStatus:
    is_early = batch.status is BatchStatus.VALIDATING
    return BatchStatus.CANCELLED if is_early else outcome_of(batch)


def _sorted(swept: Any) -> tuple[list[str], list[str], bool]:
    return sorted(swept.file_ids), sorted(swept.batch_ids), swept.has_more


TestStoresAgree = StoresAgree.TestCase
TestStoresAgree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
