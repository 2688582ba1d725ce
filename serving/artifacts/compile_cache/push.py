"""Brings the programs that a host has and the store lacks into the store, after a healthy warm-up.

Owns the order that makes it safe: first the bytes, each under its own digest, and last one manifest
under a name that nobody else has. A push that ends in the middle leaves bytes that no manifest
names (`prune` removes them), and never a manifest that names missing bytes.
"""

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

from serving.artifacts.compile_cache.key import CacheKey
from serving.artifacts.compile_cache.layout import (
    KeyPlace,
    Manifest,
    ProgramEntry,
    blob_name,
    content_digest,
)
from serving.artifacts.compile_cache.local_folder import LocalFolder, is_whole
from serving.artifacts.compile_cache.pull import read_known
from serving.artifacts.compile_cache.report import Damage, PushReport, TransferOutcome
from serving.artifacts.object_store.store import ObjectStore, StoreError


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a push, named for readers of manifests, and the two clocks that it goes by."""

    name: str
    wall_clock: Callable[[], float]
    clock: Callable[[], float]


def push(
    store: ObjectStore,
    key: CacheKey,
    folder: LocalFolder,
    writer: Writer,
    budget_s: float,
    damage: Collection[Damage] = (),
) -> PushReport:
    """Adds what the store lacks under `key`; another push of the same host adds nothing.

    `damage` is the damage that this host's pull has found. Those bytes are written again even if
    the store reports that it has them. When `budget_s` seconds are over, the manifest names what
    has been written by then, and the rest is left for another push.

    Raises:
        OSError: the disk of this host fails.
    """
    started_s = writer.clock()
    place = KeyPlace(key.family, key.digest)
    attempt = _Push(store, folder, {each.digest for each in damage})
    damaged_names = {each.name for each in damage}
    try:
        known = read_known(store, store.list(place.manifests))
        for name in sorted(folder.sizes()):
            newest = next(iter(known.get(name, ())), None)
            if newest is not None and newest.digest not in attempt.damaged:
                continue
            if writer.clock() - started_s >= budget_s:
                attempt.is_late = True
                break
            attempt.add(name)
        if attempt.entries:
            attempt.name_under(place, key, writer)
    except StoreError as error:
        return PushReport(TransferOutcome.UNREACHABLE, str(error), writer.clock() - started_s)
    outcome, reason = TransferOutcome.DONE, "all that the store lacked"
    if attempt.is_late:
        outcome, reason = TransferOutcome.OUT_OF_TIME, f"the rest is left after {budget_s:g} s"
    elif not attempt.entries:
        outcome, reason = TransferOutcome.NOTHING, "the store has all programs of this host"
    return PushReport(
        outcome,
        reason,
        writer.clock() - started_s,
        num_pushed=len(attempt.entries),
        num_rebuilt=sum(entry.name in damaged_names for entry in attempt.entries),
        num_bytes=attempt.num_bytes,
        num_refused=attempt.num_refused,
    )


class _Push:
    def __init__(self, store: ObjectStore, folder: LocalFolder, damaged: set[str]) -> None:
        self.damaged = damaged
        self.entries: list[ProgramEntry] = []
        self.num_bytes = 0
        self.num_refused = 0
        self.is_late = False
        self._store = store
        self._folder = folder

    def add(self, name: str) -> None:
        """Sends one program's bytes, unless they are there."""
        data = self._folder.read(name)
        if data is None:
            return
        if not is_whole(data):
            # Being written, or cut short: the next pull of this host removes it.
            self.num_refused += 1
            return
        digest = content_digest(data)
        if not self._is_there(digest, len(data)):
            self._store.put(blob_name(digest), data)
            self.num_bytes += len(data)
        self.entries.append(ProgramEntry(name=name, digest=digest, num_bytes=len(data)))

    def name_under(self, place: KeyPlace, key: CacheKey, writer: Writer) -> None:
        """Writes the record and, last, the manifest."""
        if self._store.head(place.record) is None:
            self._store.put(place.record, key.record)
        now_s = writer.wall_clock()
        manifest = Manifest(writer=writer.name, written_at_s=now_s, entries=tuple(self.entries))
        name = f"{place.manifests}/{int(now_s)}-{uuid.uuid4().hex[:12]}.json"
        self._store.put(name, manifest.model_dump_json().encode())

    def _is_there(self, digest: str, num_bytes: int) -> bool:
        if digest in self.damaged:
            return False
        stored = self._store.head(blob_name(digest))
        return stored is not None and stored.num_bytes == num_bytes
