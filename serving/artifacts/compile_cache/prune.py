"""Decides what may go from a store of compiled programs, and deletes it.

Owns the choice, which is pure, and carrying it out. Deleting is safe beside engines that pull and
push: a missing program is compiled and pushed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.artifacts.compile_cache.layout import BLOBS, KEYS, KeyPlace, digests, place_in
from serving.artifacts.compile_cache.pull import read_known
from serving.artifacts.object_store.store import ObjectStore, StoredObject

# A push writes bytes before the manifest that names them; none takes nearly as long.
GRACE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The use of one key: its blobs, its objects, and the wall time of its latest pull or push."""

    place: KeyPlace
    used_at_s: float
    blobs: frozenset[str]
    objects: tuple[str, ...]
    num_programs: int


@dataclass(frozen=True, slots=True)
class Holding:
    """The contents of a store at one time. `blobs` are by digest."""

    keys: tuple[KeyUse, ...]
    blobs: dict[str, StoredObject]

    @property
    def num_bytes(self) -> int:
        """The bytes of all blobs."""
        return sum(blob.num_bytes for blob in self.blobs.values())


@dataclass(frozen=True, slots=True)
class Pruning:
    """The keys and blobs that go, and the bytes that they free."""

    keys: tuple[KeyUse, ...]
    blobs: tuple[StoredObject, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the blobs that go."""
        return sum(blob.num_bytes for blob in self.blobs)


def read_holding(store: ObjectStore) -> Holding:
    """Returns all keys, the one used last first, and all blobs.

    Raises:
        StoreError: the store does not answer.
    """
    by_place: dict[KeyPlace, list[StoredObject]] = {}
    for stored in store.list(KEYS):
        place = place_in(stored.name)
        if place is not None:
            by_place.setdefault(place, []).append(stored)
    keys = []
    for place, objects in by_place.items():
        known = read_known(store, objects)
        keys.append(
            KeyUse(
                place,
                max(stored.modified_s for stored in objects),
                frozenset(digests(known)),
                tuple(stored.name for stored in objects),
                len(known),
            )
        )
    keys.sort(key=lambda key: (-key.used_at_s, key.place.digest))
    blobs = {stored.name.rpartition("/")[2]: stored for stored in store.list(BLOBS)}
    return Holding(tuple(keys), blobs)


def plan_pruning(
    holding: Holding, now_s: float, unused_s: float | None, max_bytes: int | None
) -> Pruning:
    """Chooses the keys that go: those unused for `unused_s`, then the oldest beyond `max_bytes`.

    The longest unused keys go until the rest fits `max_bytes`. `None` means no such bound. The key
    used last always stays. Blobs that no key names any more go, once they are `GRACE_S` old. Pure.
    """
    kept = list(holding.keys)
    gone: list[KeyUse] = []
    while len(kept) > 1:
        is_old = unused_s is not None and now_s - kept[-1].used_at_s > unused_s
        is_much = max_bytes is not None and _bytes_of(holding, kept) > max_bytes
        if not (is_old or is_much):
            break
        gone.append(kept.pop())
    named = {digest for key in kept for digest in key.blobs}
    blobs = [
        blob
        for digest, blob in holding.blobs.items()
        if digest not in named and now_s - blob.modified_s > GRACE_S
    ]
    return Pruning(tuple(gone), tuple(blobs))


def carry_out(store: ObjectStore, pruning: Pruning) -> None:
    """Deletes keys, then blobs, so that an interruption leaves only bytes that nothing names.

    Raises:
        StoreError: not all of it was deleted. Do it again.
    """
    for key in pruning.keys:
        for name in key.objects:
            store.delete(name)
    for blob in pruning.blobs:
        store.delete(blob.name)


def _bytes_of(holding: Holding, keys: Sequence[KeyUse]) -> int:
    named = {digest for key in keys for digest in key.blobs}
    return sum(blob.num_bytes for digest, blob in holding.blobs.items() if digest in named)
