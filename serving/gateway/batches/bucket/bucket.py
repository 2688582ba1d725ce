"""The documents of the batch lane in one bucket, and what follows from the end of a batch."""

from collections.abc import Iterator

from serving.artifacts.object_store.store import StoredObject, VersionedStore
from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.catalog import Catalog, FileEntry, settled
from serving.gateway.batches.bucket.documents import Documents
from serving.gateway.batches.bucket.head import BatchHead
from serving.gateway.batches.bucket.names import OpenMarker


class BatchBucket:
    """The bucket as heads and catalogs."""

    def __init__(self, store: VersionedStore) -> None:
        self.store = store
        self.heads = Documents(store, BatchHead)
        self.catalogs = Documents(store, Catalog)

    def objects(self, folder: str) -> Iterator[StoredObject]:
        """Yields what is below a folder, by name; a page is asked for when it is needed."""
        after = ""
        while page := self.store.list_from(folder, after):
            after = page[-1].name
            yield from page

    def open_markers(self) -> list[OpenMarker]:
        """Returns the open batches, those first whose window is over first."""
        markers = (names.marker_of(each.name) for each in self.objects(names.OPEN))
        return [marker for marker in markers if marker is not None]

    def catalog(self, tenant: str) -> Catalog:
        """Returns what a tenant has."""
        return self.catalogs.read(names.catalog_name(tenant)) or Catalog(tenant=tenant)

    def head(self, batch_id: str) -> BatchHead | None:
        """Returns the head of a batch; `None` if there is none. The id may be of a client."""
        return self.heads.read(names.head_name(batch_id)) if names.is_id(batch_id) else None

    def file(self, tenant: str, file_id: str) -> FileEntry | None:
        """Returns a file that clients see; `None` if there is none.

        A file of answers is there once its batch has ended with it, though whoever ended it died
        before the catalog said so.
        """
        entry = self.catalog(tenant).file(file_id)
        if entry is None or not entry.is_hidden or entry.made_by is None:
            return entry
        head = self.head(entry.made_by)
        if head is None or not head.batch.has_ended:
            return None
        self.settle(head)
        return self.catalog(tenant).file(file_id)

    def settle(self, head: BatchHead) -> None:
        """Does what follows from the end of a batch; again, if somebody has died over it."""
        batch = head.batch
        at_s = batch.entered[batch.status]
        self.catalogs.change(
            names.catalog_name(batch.tenant),
            lambda found: None if found is None else settled(found, batch, head.file_ids, at_s),
        )
        answers = self.store.list(names.answers_folder(batch.batch_id))
        self.store.delete_all([each.name for each in answers])
        # The last step: as long as it is there, somebody looks after the batch.
        self.store.delete(names.marker_name(batch))
