"""Deletes from a bucket what has had its time, and what nobody has."""

from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.bucket import BatchBucket
from serving.gateway.batches.bucket.catalog import Catalog, SweptCatalog, swept
from serving.gateway.batches.bucket.documents import Document, Documents
from serving.gateway.batches.store import Swept

# What is in no catalog is older than this when it is deleted: no upload takes as long, and no batch
# takes as long to make.
ORPHAN_S = 6 * 3600.0
# One gateway of all looks for it so often, because it lists the whole bucket.
_ORPHANS_EVERY_S = 6 * 3600.0
_NOTE = "orphans-looked-for"


class _SweepNote(Document, frozen=True, kw_only=True):
    """When the bucket was last looked through."""

    at_s: float


class BucketSweeper:
    """Sweeps a bucket. Used from any thread."""

    def __init__(self, bucket: BatchBucket) -> None:
        self._bucket = bucket
        self._notes = Documents(bucket.store, _SweepNote)

    def sweep(self, now_s: float, batch_lifetime_s: float) -> Swept:
        """Deletes what has had its time; see `BatchStore.sweep`."""
        total = Swept([], [], has_more=False)
        for stored in self._bucket.objects(names.TENANTS):
            done = self._swept(stored.name, now_s, batch_lifetime_s)
            total = Swept(
                total.file_ids + done.file_ids,
                total.batch_ids + done.batch_ids,
                total.has_more or done.has_more,
            )
        if self._is_to_look_through(now_s):
            self._delete_orphans(now_s)
        return total

    def _swept(self, name: str, now_s: float, batch_lifetime_s: float) -> Swept:
        result: SweptCatalog | None = None

        def decided(found: Catalog | None) -> Catalog | None:
            nonlocal result
            result = None if found is None else swept(found, now_s, batch_lifetime_s)
            return None if result is None else result.catalog

        self._bucket.catalogs.change(name, decided)
        if result is None:
            return Swept([], [], has_more=False)
        # A crash before this leaves what nobody has.
        contents = [names.content_name(each) for each in result.content_ids]
        heads = [names.head_name(each) for each in result.swept.batch_ids]
        self._bucket.store.delete_all(contents + heads)
        return result.swept

    def _is_to_look_through(self, now_s: float) -> bool:
        is_mine = False

        def decided(note: _SweepNote | None) -> _SweepNote | None:
            nonlocal is_mine
            is_mine = note is None or note.at_s <= now_s - _ORPHANS_EVERY_S
            return _SweepNote(at_s=now_s) if is_mine else note

        self._notes.change(_NOTE, decided)
        return is_mine

    def _delete_orphans(self, now_s: float) -> None:
        # Read after the objects: what is named by then stays.
        old = [
            each.name
            for folder in (names.CONTENTS, names.BATCHES)
            for each in self._bucket.objects(folder)
            if each.modified_s < now_s - ORPHAN_S
        ]
        named: set[str] = set()
        for stored in self._bucket.objects(names.TENANTS):
            catalog = self._bucket.catalogs.read(stored.name)
            if catalog is not None:
                named |= {names.content_name(each) for each in catalog.content_ids()}
                named |= {each.batch_id for each in catalog.batches}
        markers = (names.marker_of(each.name) for each in self._bucket.objects(names.OPEN))
        named |= {marker.batch_id for marker in markers if marker is not None}
        nobodys = [name for name in old if name not in named and names.batch_of(name) not in named]
        self._bucket.store.delete_all(nobodys)
