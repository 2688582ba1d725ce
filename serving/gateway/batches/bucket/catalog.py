"""The catalog of a tenant: which files and batches it has, in the order in which they came. Pure.

One document, so that a tenant's bytes are bounded exactly, and a file that a batch reads is not
deleted beside it. What a batch is doing is not here but in its head: `is_open` stays until somebody
has seen there that it ended.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from serving.gateway.batches.bucket.documents import Document
from serving.gateway.batches.records import Batch, FilePurpose, StoredFile
from serving.gateway.batches.store import (
    MAX_SWEPT,
    PLACE_S,
    FileInUseError,
    MissingFileError,
    Page,
    StoreFullError,
    Swept,
    TenantBounds,
    TooManyOpenError,
)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file and its content. `made_by` is the batch whose answers it has.

    It is not there for clients while it `is_hidden`: until its batch has ended with it.
    """

    file: StoredFile
    content_id: str
    seq: int
    made_by: str | None = None
    is_hidden: bool = False


class BatchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. `ended_at_s` and `keep_until_s` are known once it is not open any more."""

    batch_id: str
    seq: int
    input_file_id: str
    made_at_s: float
    is_open: bool = True
    ended_at_s: float = 0.0
    keep_until_s: float | None = None


E = TypeVar("E", FileEntry, BatchEntry)


class GoneEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a record that is gone, and the content that goes with it."""

    record_id: str
    seq: int
    at_s: float
    content_id: str | None = None


class Catalog(Document, frozen=True, kw_only=True):
    """All that a tenant has."""

    tenant: str
    next_seq: int = 1
    files: tuple[FileEntry, ...] = ()
    batches: tuple[BatchEntry, ...] = ()
    gone: tuple[GoneEntry, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(each.file.num_bytes for each in self.files)

    def file(self, file_id: str) -> FileEntry | None:
        """Returns a file; `None` if there is none."""
        return next((each for each in self.files if each.file.file_id == file_id), None)

    def has_batch(self, batch_id: str) -> bool:
        """Returns whether it has that batch."""
        return any(each.batch_id == batch_id for each in self.batches)

    def open_readers(self, file_id: str) -> list[str]:
        """Returns the batches that read a file and are not known to have ended."""
        return [
            each.batch_id for each in self.batches if each.is_open and each.input_file_id == file_id
        ]

    def content_ids(self) -> set[str]:
        """Returns the contents that it needs."""
        gone = {each.content_id for each in self.gone if each.content_id is not None}
        return {each.content_id for each in self.files} | gone


def with_files(
    catalog: Catalog,
    files: Sequence[tuple[StoredFile, str]],
    max_bytes: int | None = None,
    made_by: str | None = None,
) -> Catalog:
    """Returns it with more files, each with the id of its content; hidden if a batch made them.

    A content that it has had already makes no second file: then this is done for the second time.

    Raises:
        StoreFullError: they would be more than `max_bytes` together; `None`: they may be.
    """
    files = [each for each in files if each[1] not in catalog.content_ids()]
    if not files:
        return catalog
    num_added = sum(file.num_bytes for file, _ in files)
    if max_bytes is not None and catalog.num_bytes + num_added > max_bytes:
        raise StoreFullError(catalog.num_bytes, max_bytes)
    entries = tuple(
        FileEntry(
            file=file,
            content_id=content_id,
            seq=catalog.next_seq + at,
            made_by=made_by,
            is_hidden=made_by is not None,
        )
        for at, (file, content_id) in enumerate(files)
    )
    return msgspec.structs.replace(
        catalog, files=catalog.files + entries, next_seq=catalog.next_seq + len(entries)
    )


def with_batch(catalog: Catalog, batch: Batch, bounds: TenantBounds) -> Catalog:
    """Returns it with a new batch; the same if it has had it already.

    Raises:
        TooManyOpenError: as many as may are not known to have ended.
        StoreFullError: its files are larger than they may be.
        MissingFileError: it has no such file to read.
    """
    was_there = any(each.record_id == batch.batch_id for each in catalog.gone)
    if was_there or catalog.has_batch(batch.batch_id):
        return catalog
    num_open = sum(each.is_open for each in catalog.batches)
    if num_open >= bounds.max_open_batches:
        raise TooManyOpenError(num_open, bounds.max_open_batches)
    if catalog.num_bytes > bounds.max_bytes:
        raise StoreFullError(catalog.num_bytes, bounds.max_bytes)
    entry = catalog.file(batch.input_file_id)
    if entry is None or entry.is_hidden or entry.file.purpose is not FilePurpose.BATCH:
        raise MissingFileError(batch.input_file_id)
    made = BatchEntry(
        batch_id=batch.batch_id,
        seq=catalog.next_seq,
        input_file_id=batch.input_file_id,
        made_at_s=batch.created_at_s,
    )
    return msgspec.structs.replace(
        catalog, batches=(*catalog.batches, made), next_seq=catalog.next_seq + 1
    )


def without_file(catalog: Catalog, file_id: str, ended: Collection[str], now_s: float) -> Catalog:
    """Returns it without a file. Batches in `ended` have ended, whatever it says of them.

    Raises:
        FileInUseError: another one reads the file.
    """
    entry = catalog.file(file_id)
    if entry is None:
        return catalog
    for batch_id in catalog.open_readers(file_id):
        if batch_id not in ended:
            raise FileInUseError(batch_id)
    return _without(catalog, files=[entry], batches=[], now_s=now_s)


def settled(catalog: Catalog, batch: Batch, file_ids: Collection[str], now_s: float) -> Catalog:
    """Returns it after the end of a batch with these files: they are there from now on."""
    kept = set(file_ids)
    mine = [each for each in catalog.files if each.is_hidden and each.made_by == batch.batch_id]
    lost = [each for each in mine if each.file.file_id not in kept]
    files = tuple(
        msgspec.structs.replace(each, is_hidden=False)
        if each.made_by == batch.batch_id and each.file.file_id in kept
        else each
        for each in catalog.files
    )
    batches = tuple(
        msgspec.structs.replace(each, is_open=False, ended_at_s=batch.entered[batch.status])
        if each.batch_id == batch.batch_id
        else each
        for each in catalog.batches
    )
    if (files, batches) == (catalog.files, catalog.batches):
        return catalog
    shown = msgspec.structs.replace(catalog, files=files, batches=batches)
    return _without(shown, files=lost, batches=[], now_s=now_s)


def without_hidden(catalog: Catalog, file_ids: Collection[str], now_s: float) -> Catalog:
    """Returns it without files that a batch has not ended with."""
    lost = [each for each in catalog.files if each.is_hidden and each.file.file_id in file_ids]
    return _without(catalog, files=lost, batches=[], now_s=now_s) if lost else catalog


@dataclass(frozen=True, slots=True)
class SweptCatalog:
    """A catalog after a sweep, and the contents and batches of which nothing is needed any more."""

    catalog: Catalog
    swept: Swept
    content_ids: list[str]


def swept(catalog: Catalog, now_s: float, lifetime_s: float) -> SweptCatalog:
    """Deletes what has had its time; see `BatchStore.sweep`."""
    files = [
        each
        for each in catalog.files
        if _has_expired(each.file, now_s) and not catalog.open_readers(each.file.file_id)
    ]
    rest = _without(catalog, files=files, batches=[], now_s=now_s)
    undated = [each for each in rest.batches if not each.is_open and each.keep_until_s is None]
    dated = {
        each.batch_id: msgspec.structs.replace(each, keep_until_s=each.ended_at_s + lifetime_s)
        for each in undated[:MAX_SWEPT]
    }
    batches = [dated.get(each.batch_id, each) for each in rest.batches]
    due = [
        each for each in batches if each.keep_until_s is not None and each.keep_until_s <= now_s
    ][:MAX_SWEPT]
    until = _files_until_s(rest.files, now_s + lifetime_s)
    put_off = {
        each.batch_id: msgspec.structs.replace(each, keep_until_s=until[each.batch_id])
        for each in due
        if each.batch_id in until
    }
    ended = [each for each in due if each.batch_id not in until]
    rest = msgspec.structs.replace(
        rest, batches=tuple(put_off.get(each.batch_id, each) for each in batches)
    )
    rest = _without(rest, files=[], batches=ended, now_s=now_s)
    old = [each for each in rest.gone if each.at_s <= now_s - PLACE_S]
    has_more = MAX_SWEPT in (len(dated), len(due))
    is_same = not (files or dated or due or old)
    if not is_same:
        young = tuple(each for each in rest.gone if each.at_s > now_s - PLACE_S)
        rest = msgspec.structs.replace(rest, gone=young)
    return SweptCatalog(
        catalog if is_same else rest,
        Swept([each.file.file_id for each in files], [each.batch_id for each in ended], has_more),
        [each.content_id for each in old if each.content_id is not None],
    )


def page_of(
    entries: Iterable[E], places: Mapping[str, int], gone: Iterable[GoneEntry], page: Page
) -> list[E]:
    """Returns a page of entries; it goes on behind a record that has gone meanwhile.

    `places` are the numbers of the records that are there, by their ids.
    """
    listed = sorted(entries, key=lambda each: each.seq, reverse=not page.is_oldest_first)
    if page.after is not None:
        after = {**{each.record_id: each.seq for each in gone}, **places}.get(page.after)
        if after is None:
            return []
        is_behind = int.__gt__ if page.is_oldest_first else int.__lt__
        listed = [each for each in listed if is_behind(each.seq, after)]
    return listed[: page.limit]


def _has_expired(file: StoredFile, now_s: float) -> bool:
    return file.expires_at_s is not None and file.expires_at_s <= now_s


def _files_until_s(files: Iterable[FileEntry], unknown_s: float) -> dict[str, float]:
    """Returns until when there are files of answers, by the batch that made them.

    `unknown_s` is when to look again after those that do not expire by themselves.
    """
    until: dict[str, float] = {}
    for each in files:
        if each.made_by is not None and not each.is_hidden:
            expires_at_s = each.file.expires_at_s
            last_s = unknown_s if expires_at_s is None else expires_at_s
            until[each.made_by] = max(last_s, until.get(each.made_by, 0.0))
    return until


def _without(
    catalog: Catalog, *, files: Sequence[FileEntry], batches: Sequence[BatchEntry], now_s: float
) -> Catalog:
    """Returns it without records, whose places it keeps."""
    gone_files = [
        GoneEntry(record_id=each.file.file_id, seq=each.seq, at_s=now_s, content_id=each.content_id)
        for each in files
    ]
    gone_batches = [
        GoneEntry(record_id=each.batch_id, seq=each.seq, at_s=now_s) for each in batches
    ]
    file_seqs, batch_seqs = {each.seq for each in files}, {each.seq for each in batches}
    return msgspec.structs.replace(
        catalog,
        files=tuple(each for each in catalog.files if each.seq not in file_seqs),
        batches=tuple(each for each in catalog.batches if each.seq not in batch_seqs),
        gone=(*catalog.gone, *gone_files, *gone_batches),
    )
