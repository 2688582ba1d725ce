"""What the owner of a batch in a bucket writes. Does not own who that is (`claims`)."""

import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor

import msgspec

from serving.artifacts.object_store.store import StoreError
from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.answers import in_order, packed, read_ahead
from serving.gateway.batches.bucket.bucket import BatchBucket
from serving.gateway.batches.bucket.catalog import Catalog, with_files, without_hidden
from serving.gateway.batches.bucket.contents import BucketContent
from serving.gateway.batches.bucket.documents import Known
from serving.gateway.batches.bucket.head import (
    BatchHead,
    changed,
    check_lease,
    released,
    renewed,
    with_answers,
)
from serving.gateway.batches.records import Batch, BatchCost, BatchLease, LineAnswer, StoredFile
from serving.gateway.batches.store import LeaseLostError


class BatchLeases:
    """Writes under the leases of batches in a bucket. Used from any thread."""

    def __init__(self, bucket: BatchBucket) -> None:
        self._bucket = bucket
        # As this process wrote them last, so that the next write needs no reading.
        self._written: dict[str, Known[BatchHead]] = {}
        self._answer_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        # Of these it is not known what was written: they are given up, and their terms with them.
        self._lost: set[tuple[str, int]] = set()

    def renew(self, lease: BatchLease, now_s: float, lease_s: float, cost: BatchCost) -> Batch:
        """Lengthens a lease; see `BatchStore.renew`."""
        change_id = uuid.uuid4().hex
        head = self._change(
            lease, lambda head: renewed(head, lease, now_s, lease_s, cost, change_id)
        )
        return head.batch

    def release(self, lease: BatchLease) -> None:
        """Gives a batch back, if it is still the lease's."""
        self._forget(lease)
        self._bucket.heads.change(
            names.head_name(lease.batch_id),
            lambda head: None if head is None else released(head, lease),
        )

    def change(self, lease: BatchLease, decide: Callable[[Batch], Batch]) -> Batch:
        """Changes a leased batch; see `BatchStore.change_leased`."""

        def decided(head: BatchHead) -> BatchHead:
            check_lease(head, lease)
            return changed(head, decide)

        head = self._change(lease, decided)
        if head.batch.has_ended:
            self._end(lease, head)
        return head.batch

    def add_answers(self, lease: BatchLease, answers: Sequence[LineAnswer]) -> Batch:
        """Keeps answers; see `BatchStore.add_answers`."""
        name, change_id = names.head_name(lease.batch_id), uuid.uuid4().hex
        with self._answer_locks[lease.batch_id]:
            if (lease.batch_id, lease.term) in self._lost:
                raise LeaseLostError(lease.batch_id)
            try:
                known = self._written.get(lease.batch_id)
                if known is None or not known[0].has_lease(lease):
                    known = self._bucket.heads.known(name)
                if known is None:
                    raise LeaseLostError(lease.batch_id)
                check_lease(known[0], lease)
                number = known[0].next_number(lease.term)
                written = names.answers_name(lease.batch_id, lease.term, number)
                self._bucket.store.put(written, packed(answers))
                result = self._bucket.heads.change(
                    name,
                    lambda head: with_answers(_of(lease, head), lease, number, answers, change_id),
                    known,
                )
            except StoreError:
                self._lost.add((lease.batch_id, lease.term))
                raise
            assert result is not None, "a head that is changed is there"
            if result[0].change_id != change_id:  # it does not count
                self._bucket.store.delete(written)
            self._written[lease.batch_id] = result
        return result[0].batch

    def answered_lines(self, batch_id: str) -> set[int]:
        """Returns the lines with an answer."""
        head = self._bucket.head(batch_id)
        return set() if head is None else head.answered_lines()

    def answers(self, batch_id: str, readers: Executor) -> Iterator[LineAnswer]:
        """Yields answers in the order of their lines; `readers` read the objects of them."""
        head = self._bucket.head(batch_id)
        if head is None:
            return
        written = (
            names.answers_name(batch_id, term, number)
            for term, last in head.written
            for number in range(1, last + 1)
        )
        yield from in_order(read_ahead(readers, self._bucket.store.get, written))

    def end(
        self,
        lease: BatchLease,
        files: Sequence[tuple[StoredFile, BucketContent]],
        decide: Callable[[Batch], Batch],
    ) -> Batch:
        """Ends a batch; see `BatchStore.end`.

        Its files come into the catalog hidden, and are there when the head says that it has ended.
        """
        for _, content in files:
            content.upload()
        tenants = {names.catalog_name(file.tenant): file.tenant for file, _ in files}
        added = [(file, content.content_id) for file, content in files]
        for name, tenant in tenants.items():
            self._bucket.catalogs.change(
                name,
                lambda found, tenant=tenant: with_files(  # type: ignore[misc]
                    found or Catalog(tenant=tenant), added, made_by=lease.batch_id
                ),
            )

        file_ids = tuple(file.file_id for file, _ in files)

        def decided(head: BatchHead) -> BatchHead:
            check_lease(head, lease)
            return msgspec.structs.replace(
                changed(head, decide),
                written=(),
                answered=b"",
                file_ids=file_ids,
            )

        try:
            head = self._change(lease, decided)
        except StoreError:
            # It may have ended: then the files are its own.
            for _, content in files:
                content.belongs()
            raise
        except BaseException:
            for name in tenants:
                self._bucket.catalogs.change(name, lambda found: _unhidden(found, file_ids))
            raise
        for _, content in files:
            content.belongs()
        self._end(lease, head)
        return head.batch

    def forget_others(self, open_ids: Collection[str]) -> None:
        """Forgets the batches that are not open: somebody else may have ended them."""
        for batch_id in self._written.keys() - set(open_ids):
            self._written.pop(batch_id, None)

    def _change(self, lease: BatchLease, decide: Callable[[BatchHead], BatchHead]) -> BatchHead:
        result = self._bucket.heads.change(
            names.head_name(lease.batch_id), lambda head: decide(_of(lease, head))
        )
        assert result is not None, "a head that is changed is there"
        return result[0]

    def _end(self, lease: BatchLease, head: BatchHead) -> None:
        self._forget(lease)
        self._bucket.settle(head)

    def _forget(self, lease: BatchLease) -> None:
        self._written.pop(lease.batch_id, None)
        self._answer_locks.pop(lease.batch_id, None)


def _of(lease: BatchLease, head: BatchHead | None) -> BatchHead:
    """Returns the head of a leased batch, which is gone if the batch has ended long ago."""
    if head is None:
        raise LeaseLostError(lease.batch_id)
    return head


def _unhidden(found: Catalog | None, file_ids: Sequence[str]) -> Catalog | None:
    return None if found is None else without_hidden(found, file_ids, 0.0)
