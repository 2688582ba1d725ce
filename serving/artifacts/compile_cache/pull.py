"""Brings the programs of one key from the store to a host, before its engine starts.

Owns the order and the bounds: whatever the store does, the pull ends within its budget and leaves
only right bytes on the disk. Does not own what happens next: an engine compiles what is missing.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from serving.artifacts.compile_cache.layout import (
    DamagedManifestError,
    KeyPlace,
    Manifest,
    ProgramEntry,
    blob_name,
    content_digest,
    is_manifest,
    place_in,
    read_manifest,
    union,
)
from serving.artifacts.compile_cache.local_folder import LocalFolder, is_whole
from serving.artifacts.compile_cache.report import Damage, PullReport, TransferOutcome
from serving.artifacts.object_store.store import (
    MissingObjectError,
    ObjectStore,
    StoredObject,
    StoreError,
)

# A bucket answers one request in tens of milliseconds and many at once as fast.
NUM_FETCHERS = 8

Clock = Callable[[], float]
Known = Mapping[str, tuple[ProgramEntry, ...]]


@dataclass(slots=True)
class _Fetched:
    num_bytes: int = 0
    has_come: bool = False
    is_late: bool = False
    damage: list[Damage] = field(default_factory=list)


def pull(
    store: ObjectStore, place: KeyPlace, folder: LocalFolder, budget_s: float, clock: Clock
) -> PullReport:
    """Fills `folder` with the store's programs for `place`, as far as `budget_s` seconds go.

    Largest programs come first, because they take longest to compile. `clock` is monotonic.
    A key without programs is filled from the newest other one of its family. Files of this host
    that are not whole are removed, whatever else happens.

    Raises:
        OSError: the disk of this host fails.
    """
    started_s = clock()
    num_dropped = _drop_broken(folder)
    errors: list[str] = []

    def report(outcome: TransferOutcome, reason: str) -> PullReport:
        return PullReport(outcome, reason, clock() - started_s, num_dropped=num_dropped)

    pool = ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="pull-programs")
    try:
        finding = pool.submit(_find, store, place)
        known, seed = finding.result(budget_s)
        if not known:
            return report(TransferOutcome.NOTHING, "the store has no programs for this key")
        wanted = _missing(folder, known)
        deadline_s = started_s + budget_s
        fetched = _fetch_all(pool, store, folder, wanted, deadline_s, clock, errors)
    except TimeoutError:
        return report(
            TransferOutcome.OUT_OF_TIME, f"the store did not list its programs in {budget_s:g} s"
        )
    except StoreError as error:
        return report(TransferOutcome.UNREACHABLE, str(error))
    finally:
        # A request under way ends by its own bounds; nobody waits for it.
        pool.shutdown(wait=False, cancel_futures=True)
    num_late = len(wanted) - sum(not each.is_late for each in fetched)
    outcome, reason = TransferOutcome.DONE, "all that it has"
    if num_late:
        outcome = TransferOutcome.UNREACHABLE if errors else TransferOutcome.OUT_OF_TIME
        reason = "; ".join([f"{num_late} of {len(wanted)} programs left", *errors[:1]])
    return PullReport(
        outcome,
        reason,
        clock() - started_s,
        num_known=len(known),
        num_present=len(known) - len(wanted),
        num_fetched=sum(each.has_come for each in fetched),
        num_bytes=sum(each.num_bytes for each in fetched),
        num_dropped=num_dropped,
        damage=tuple(damage for each in fetched for damage in each.damage),
        seed=seed,
    )


def read_known(
    store: ObjectStore, listed: Iterable[StoredObject]
) -> dict[str, tuple[ProgramEntry, ...]]:
    """Returns the union of the manifests in `listed`; a damaged or missing one names nothing.

    Raises:
        StoreError: the store does not answer.
    """
    manifests: list[Manifest] = []
    for stored in listed:
        if is_manifest(stored.name):
            with contextlib.suppress(DamagedManifestError, MissingObjectError):
                manifests.append(read_manifest(store.get(stored.name)))
    return union(manifests)


def _find(store: ObjectStore, place: KeyPlace) -> tuple[Known, str | None]:
    """Returns the programs of the key, or of its newest relative with the relative's digest."""
    listed = store.list(place.family_folder)
    by_place: dict[KeyPlace, list[StoredObject]] = {}
    for stored in listed:
        owner = place_in(stored.name)
        if owner is not None and is_manifest(stored.name):
            by_place.setdefault(owner, []).append(stored)
    known = read_known(store, by_place.pop(place, ()))
    if known:
        return known, None
    newest_first = sorted(
        by_place, key=lambda each: max(stored.modified_s for stored in by_place[each]), reverse=True
    )
    for relative in newest_first:
        known = read_known(store, by_place[relative])
        if known:
            return known, relative.digest
    return {}, None


def _drop_broken(folder: LocalFolder) -> int:
    """Removes files that a killed engine left half-written; returns how many."""
    num_dropped = 0
    for name in folder.sizes():
        data = folder.read(name)
        if data is not None and not is_whole(data):
            folder.remove(name)
            num_dropped += 1
    return num_dropped


def _missing(folder: LocalFolder, known: Known) -> dict[str, tuple[ProgramEntry, ...]]:
    """Returns the programs of `known` that differ here or are missing, the largest first."""
    wanted = {}
    sizes = folder.sizes()
    for name, entries in known.items():
        data = folder.read(name) if name in sizes else None
        if data is None or content_digest(data) not in {entry.digest for entry in entries}:
            wanted[name] = entries
    largest_first = sorted(wanted, key=lambda name: wanted[name][0].num_bytes, reverse=True)
    return {name: wanted[name] for name in largest_first}


def _fetch_all(
    pool: ThreadPoolExecutor,
    store: ObjectStore,
    folder: LocalFolder,
    wanted: Mapping[str, tuple[ProgramEntry, ...]],
    deadline_s: float,
    clock: Clock,
    errors: list[str],
) -> list[_Fetched]:
    """Returns the result of each fetch; `errors` gets the store's errors."""

    def fetch(entries: tuple[ProgramEntry, ...]) -> _Fetched:
        # After one failed call of the store the other fetches do not try.
        if clock() >= deadline_s or errors:
            return _Fetched(is_late=True)
        try:
            return _fetch(store, folder, entries)
        except StoreError as error:
            errors.append(str(error))
            return _Fetched(is_late=True)

    fetches = [pool.submit(fetch, entries) for entries in wanted.values()]
    fetched: list[_Fetched] = []
    with contextlib.suppress(TimeoutError):
        # What has come before the deadline stays in the list.
        fetched.extend(
            done.result() for done in as_completed(fetches, timeout=max(0.0, deadline_s - clock()))
        )
    return fetched


def _fetch(store: ObjectStore, folder: LocalFolder, entries: tuple[ProgramEntry, ...]) -> _Fetched:
    """Writes the first of `entries` with the right bytes.

    Raises:
        StoreError: the store does not answer.
    """
    result = _Fetched()
    for entry in entries:
        try:
            data = store.get(blob_name(entry.digest))
        except MissingObjectError:
            result.damage.append(Damage(entry.name, entry.digest, "missing"))
            continue
        result.num_bytes += len(data)
        if content_digest(data) == entry.digest:
            folder.write(entry.name, data)
            result.has_come = True
            return result
        reason = "truncated" if len(data) < entry.num_bytes else "altered"
        result.damage.append(Damage(entry.name, entry.digest, reason))
    # JAX neither checks nor replaces a file that it finds here under this name.
    folder.remove(entries[0].name)
    return result
