"""Keeps the batch lane in a GCS or S3 bucket, for gateways on any number of nodes.

What changes at once is one document: a tenant's catalog, or the head of a batch. Each is replaced
on the condition that nobody else has replaced it (`documents`). What takes two of them is in an
order in which a crash between them leaves nothing that a client sees, and something that the next
one who looks puts right: `add_batch`, `end` and `settle` say which. `store` of the lane says what
each call does.

A bucket takes some writes to one object a second and no more, so answers are written some seconds
apart (`write_interval_s`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from serving.artifacts.object_store.store import ConflictError, StoreError, VersionedStore
from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.bucket import BatchBucket
from serving.gateway.batches.bucket.catalog import (
    Catalog,
    page_of,
    with_batch,
    with_files,
    without_file,
)
from serving.gateway.batches.bucket.claims import BatchClaims
from serving.gateway.batches.bucket.contents import BucketContent, open_content
from serving.gateway.batches.bucket.documents import UnreadableError
from serving.gateway.batches.bucket.head import BatchHead, changed
from serving.gateway.batches.bucket.leases import BatchLeases
from serving.gateway.batches.bucket.names import OpenMarker
from serving.gateway.batches.bucket.sweeps import BucketSweeper
from serving.gateway.batches.records import Batch, BatchCost, BatchLease, LineAnswer, StoredFile
from serving.gateway.batches.store import (
    NO_BOUNDS,
    Claim,
    MissingFileError,
    NewContent,
    Page,
    StoreFullError,
    Swept,
    TenantBounds,
    TooManyOpenError,
)

# GCS lets one object be written once a second on average, by cloud.google.com/storage/quotas as
# read in November 2026. A batch's head is written for its answers, its lease and its cost.
WRITE_INTERVAL_S = 2.0
_READS_AT_ONCE = 8


class BucketBatchStore:
    """The batch lane in a bucket. Implements `BatchStore`."""

    def __init__(self, store: VersionedStore, write_interval_s: float = WRITE_INTERVAL_S) -> None:
        """Makes no request yet."""
        self.write_interval_s = write_interval_s
        self._bucket = BatchBucket(store)
        self._claims = BatchClaims(self._bucket)
        self._leases = BatchLeases(self._bucket)
        self._sweeper = BucketSweeper(self._bucket)
        self._readers = ThreadPoolExecutor(_READS_AT_ONCE, "batch-heads")
        self._answer_readers = ThreadPoolExecutor(_READS_AT_ONCE, "batch-answers")

    # -- files --

    def new_content(self) -> BucketContent:
        """Begins a content, in a file of this host."""
        return BucketContent(self._bucket.store)

    def add_file(self, file: StoredFile, content: NewContent, max_tenant_bytes: int) -> None:
        """Makes a file; see `BatchStore.add_file`."""
        written = _written(content)

        def decided(found: Catalog | None) -> Catalog:
            added = [(file, written.content_id)]
            return with_files(found or Catalog(tenant=file.tenant), added, max_tenant_bytes)

        # It is decided below; what has no room now is not uploaded.
        decided(self._bucket.catalog(file.tenant))
        written.upload()
        try:
            self._bucket.catalogs.change(names.catalog_name(file.tenant), decided)
        except StoreError:
            # The catalog may name it. If it does not, a sweep finds that nobody has it.
            written.belongs()
            raise
        written.belongs()

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Returns a tenant's file."""
        entry = self._bucket.file(tenant, file_id)
        return None if entry is None else entry.file

    def files(self, tenant: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Returns a tenant's files, the newest first unless the page says otherwise."""
        catalog = self._bucket.catalog(tenant)
        shown = [
            each
            for each in catalog.files
            if not each.is_hidden and (purpose is None or each.file.purpose == purpose)
        ]
        places = {each.file.file_id: each.seq for each in catalog.files}
        return [each.file for each in page_of(shown, places, catalog.gone, page)]

    def delete_file(self, tenant: str, file_id: str, now_s: float) -> bool:
        """Deletes a file; see `BatchStore.delete_file`. Its content goes with a later sweep."""
        if self._bucket.file(tenant, file_id) is None:
            return False
        ended: set[str] = set()
        for batch_id in self._bucket.catalog(tenant).open_readers(file_id):
            head = self._bucket.head(batch_id)
            if head is None or head.batch.has_ended:
                ended.add(batch_id)
        was_there = False

        def decided(found: Catalog | None) -> Catalog | None:
            nonlocal was_there
            was_there |= found is not None and found.file(file_id) is not None
            return None if found is None else without_file(found, file_id, ended, now_s)

        self._bucket.catalogs.change(names.catalog_name(tenant), decided)
        return was_there

    def open_content(self, tenant: str, file_id: str) -> BinaryIO:
        """Opens the content of a file; see `BatchStore.open_content`."""
        entry = self._bucket.file(tenant, file_id)
        if entry is None:
            raise MissingFileError(file_id)
        return open_content(self._bucket.store, entry.content_id, entry.file.num_bytes)

    def sweep(self, now_s: float, batch_lifetime_s: float) -> Swept:
        """Deletes what has had its time; see `BatchStore.sweep`."""
        return self._sweeper.sweep(now_s, batch_lifetime_s)

    # -- batches --

    def add_batch(self, batch: Batch, bounds: TenantBounds = NO_BOUNDS) -> None:
        """Takes a batch in; see `BatchStore.add_batch`.

        It is made when the catalog has it. Who claims it looks there, and after a crash before that
        deletes what is left.
        """

        def decided(found: Catalog | None) -> Catalog:
            return with_batch(found or Catalog(tenant=batch.tenant), batch, bounds)

        # It is decided below; of what is refused now nothing is written.
        decided(self._bucket.catalog(batch.tenant))
        head, marker = names.head_name(batch.batch_id), names.marker_name(batch)
        self._bucket.heads.change(head, lambda found: found or BatchHead(batch=batch))
        self._bucket.store.put(marker, b"")
        try:
            self._add_to_catalog(batch.tenant, decided)
        except (MissingFileError, StoreFullError, TooManyOpenError):
            self._bucket.store.delete_all([marker, head])
            raise

    def _add_to_catalog(self, tenant: str, decided: Callable[[Catalog | None], Catalog]) -> None:
        name = names.catalog_name(tenant)
        try:
            self._bucket.catalogs.change(name, decided)
        except ConflictError:
            raise  # it was not written
        except StoreError:
            # It may be there, and would be run. A client that heard of a failure would make
            # another one of the same lines.
            self._bucket.catalogs.change(name, decided)

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns a tenant's batch."""
        head = self._bucket.head(batch_id)
        return None if head is None or head.batch.tenant != tenant else head.batch

    def batches(self, tenant: str, page: Page) -> list[Batch]:
        """Returns a tenant's batches, the newest first unless the page says otherwise."""
        catalog = self._bucket.catalog(tenant)
        places = {each.batch_id: each.seq for each in catalog.batches}
        entries = page_of(catalog.batches, places, catalog.gone, page)
        found = self._readers.map(lambda each: self.batch(tenant, each.batch_id), entries)
        return [batch for batch in found if batch is not None]

    def open_batches(self, limit: int) -> list[Batch]:
        """Returns batches that have not ended; see `BatchStore.open_batches`."""
        markers = names.in_turn(self._bucket.open_markers())[:limit]
        heads = self._readers.map(self._open_head, markers)
        return [head.batch for head in heads if head is not None and not head.batch.has_ended]

    def _open_head(self, marker: OpenMarker) -> BatchHead | None:
        """Returns the head of an open batch; of one that this build cannot read `claim` tells."""
        try:
            return self._bucket.head(marker.batch_id)
        except UnreadableError:
            return None

    def change(self, tenant: str, batch_id: str, decide: Callable[[Batch], Batch]) -> Batch | None:
        """Changes a batch, whoever has it; see `BatchStore.change`."""
        if self.batch(tenant, batch_id) is None:
            return None
        result = self._bucket.heads.change(
            names.head_name(batch_id),
            lambda head: None if head is None else changed(head, decide),
        )
        self._claims.forget(batch_id)
        return None if result is None else result[0].batch

    def change_free(
        self, tenant: str, batch_id: str, now_s: float, decide: Callable[[Batch], Batch]
    ) -> Batch | None:
        """Changes a batch that nobody has; see `BatchStore.change_free`."""
        if self.batch(tenant, batch_id) is None:
            return None
        is_free = False

        def decided(head: BatchHead | None) -> BatchHead | None:
            nonlocal is_free
            is_free = head is not None and head.until_s <= now_s
            return changed(head, decide) if head is not None and is_free else None

        result = self._bucket.heads.change(names.head_name(batch_id), decided)
        if result is None or not is_free:
            return None
        self._claims.forget(batch_id)
        head = result[0]
        if head.batch.has_ended:
            self._bucket.settle(head)
        return head.batch

    # -- by the owner of a batch --

    def claim(
        self, owner: str, now_s: float, lease_s: float, which: Claim = Claim.ANY
    ) -> BatchLease | None:
        """Leases a batch; see `BatchStore.claim`."""
        markers = self._bucket.open_markers()
        self._leases.forget_others([marker.batch_id for marker in markers])
        return self._claims.claim(markers, owner, now_s, lease_s, which)

    def renew(self, lease: BatchLease, now_s: float, lease_s: float, cost: BatchCost) -> Batch:
        """Lengthens a lease; see `BatchStore.renew`."""
        return self._leases.renew(lease, now_s, lease_s, cost)

    def release(self, lease: BatchLease) -> None:
        """Gives a batch back, if it is still the lease's."""
        self._leases.release(lease)
        self._claims.forget(lease.batch_id)

    def change_leased(self, lease: BatchLease, decide: Callable[[Batch], Batch]) -> Batch:
        """Changes a leased batch; see `BatchStore.change_leased`."""
        return self._leases.change(lease, decide)

    def add_answers(self, lease: BatchLease, answers: Sequence[LineAnswer]) -> Batch:
        """Keeps answers; see `BatchStore.add_answers`."""
        return self._leases.add_answers(lease, answers)

    def answered_lines(self, batch_id: str) -> set[int]:
        """Returns the lines with an answer."""
        return self._leases.answered_lines(batch_id)

    def answers(self, batch_id: str) -> Iterator[LineAnswer]:
        """Yields answers in the order of their lines."""
        return self._leases.answers(batch_id, self._answer_readers)

    def end(
        self,
        lease: BatchLease,
        files: Sequence[tuple[StoredFile, NewContent]],
        decide: Callable[[Batch], Batch],
    ) -> Batch:
        """Ends a batch; see `BatchStore.end`."""
        written = [(file, _written(content)) for file, content in files]
        return self._leases.end(lease, written, decide)

    def close(self) -> None:
        """Ends its threads. Idempotent."""
        self._readers.shutdown(cancel_futures=True)
        self._answer_readers.shutdown(cancel_futures=True)


def _written(content: NewContent) -> BucketContent:
    assert isinstance(content, BucketContent), "the content is of another store"
    return content
