"""Changes documents of a bucket, each as a whole: read, decide, write if nobody else has written.

Owns the reading again after a conflict, and finding out whether a write of ours was the other one:
a client may send a write twice when its answer is lost. So each write leaves an id of its own in
the document, by which, too, no two versions of a document have the same bytes.
"""

import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from serving.artifacts.object_store.store import (
    ConflictError,
    MissingObjectError,
    ObjectVersion,
    StoreError,
    VersionedStore,
)

# Writers of one document wait for each other; of other documents they rarely do.
_NUM_LOCKS = 64
# A document that others change for so long is not one that works.
_PATIENCE_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0


class UnreadableError(StoreError):
    """Reports a document that is there and is none of this build's: perhaps a newer one's."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What is written as one object. `write_id` is of the write that made it."""

    write_id: str = ""


D = TypeVar("D", bound=Document)
# A document as it is known: its version too, or that there is none.
Known = tuple[D, ObjectVersion] | None


class Documents(Generic[D]):
    """The documents of one kind in a bucket. Used from any thread."""

    def __init__(self, store: VersionedStore, kind: type[D]) -> None:
        self._store = store
        self._decoder = msgspec.json.Decoder(kind)
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]

    def read(self, name: str) -> D | None:
        """Returns a document; `None` if there is none.

        Raises:
            UnreadableError: it is not what this build writes.
            StoreError: it could not be had.
        """
        known = self.known(name)
        return None if known is None else known[0]

    def known(self, name: str) -> Known[D]:
        """Returns a document with its version; `None` if there is none; raises as `read`."""
        try:
            found = self._store.read(name)
        except MissingObjectError:
            return None
        try:
            return self._decoder.decode(found.data), found.version
        except msgspec.DecodeError as error:
            raise UnreadableError(f"{name}: not what was written: {error}") from error

    def change(
        self,
        name: str,
        decide: Callable[[D | None], D | None],
        known: Known[D] = None,
    ) -> tuple[D, ObjectVersion] | None:
        """Writes what `decide` makes of a document, and returns what is there then.

        `decide` is pure: it may be asked again, of what another writer has made. `None` from it, or
        the document itself, changes nothing. `known`, as it was some time ago, spares a reading.
        What `decide` raises is raised, and nothing is changed.

        Raises:
            StoreError: it could not be read, or whether it was written is not known.
        """
        write_id = uuid.uuid4().hex
        until_s = time.monotonic() + _PATIENCE_S
        wait_s = _FIRST_WAIT_S
        with self._locks[hash(name) % _NUM_LOCKS]:
            current = known or self.known(name)
            is_old = known is not None
            while True:
                if current is not None and current[0].write_id == write_id:
                    return current
                document, version = (None, None) if current is None else current
                decided = decide(document)
                if decided is None or decided is document:
                    if not is_old:
                        return current
                    # That it stays as it was says nothing of how it is.
                    current, is_old = self.known(name), False
                    continue
                decided = msgspec.structs.replace(decided, write_id=write_id)
                data = msgspec.json.encode(decided)
                try:
                    return decided, self._store.write_if(name, data, version)
                except (ConflictError, MissingObjectError):
                    if time.monotonic() > until_s:
                        raise
                # Writers that met once do not meet again in the same way.
                time.sleep(random.uniform(0, wait_s))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                current, is_old = self.known(name), False
