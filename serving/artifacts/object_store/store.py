"""The seam that makes a folder, a GCS bucket and an S3 bucket interchangeable.

Owns the protocols and their errors. Does not own which store an address means (`address`), nor what
is kept there. Names are relative, parts joined by `/`; an implementation never leaves its prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol


class StoreError(Exception):
    """Reports a failed call of the store: unreachable, refused, full. Go on without it."""


class MissingObjectError(StoreError):
    """Reports that there is no object of this name. Do not retry."""


class ConflictError(StoreError):
    """Reports that an object is not the version that a write was to replace. Read it again.

    The write itself may be why, if an answer to it was lost and it was sent twice.
    """


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """What a write has to find. Two writes of the same bytes may have the same version in S3."""

    e_tag: str | None
    generation: str | None


@dataclass(frozen=True, slots=True)
class VersionedObject:
    """A whole object, and its version."""

    data: bytes
    version: ObjectVersion


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The store's facts of one object. `modified_s` is wall-clock time by the store's clock."""

    name: str
    num_bytes: int
    modified_s: float
    version: str | None = None  # changes with the content; None: the store has none


class ObjectStore(Protocol):
    """The interface of a store: blocking calls, safe from several threads and several machines."""

    def get(self, name: str) -> bytes:
        """Returns the whole object.

        Raises:
            MissingObjectError: there is none.
            StoreError: it could not be had.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Writes or replaces an object; a reader sees the old bytes or the new, never a part.

        Raises:
            StoreError: it was not written.
        """
        ...

    def head(self, name: str) -> StoredObject | None:
        """Returns the store's facts of the object; `None` if there is none.

        Raises:
            StoreError: the store did not answer.
        """
        ...

    def list(self, folder: str) -> list[StoredObject]:
        """Returns all objects below `folder`, at any depth, by name; none without such a folder.

        Raises:
            StoreError: the store did not answer.
        """
        ...

    def delete(self, name: str) -> None:
        """Removes an object; one that is not there is no error.

        Raises:
            StoreError: it may still be there.
        """
        ...


class VersionedStore(ObjectStore, Protocol):
    """A store that writes on a condition: a bucket. What was written is there for every reader."""

    def read(self, name: str) -> VersionedObject:
        """Returns the object with its version; raises as `get`."""
        ...

    def write_if(self, name: str, data: bytes, version: ObjectVersion | None) -> ObjectVersion:
        """Replaces that version of an object; `None`: makes an object where there is none.

        Raises:
            ConflictError: it is of another version, or there is one.
            StoreError: whether it was written is not known.
        """
        ...

    def upload(self, name: str, content: BinaryIO) -> None:
        """Writes an object of any length from a file, a part at a time; raises as `put`."""
        ...

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to before `end`, or to the object's end; raises as `get`.

        At least one byte has to be there.
        """
        ...

    def list_from(self, folder: str, after: str = "") -> Sequence[StoredObject]:
        """Returns what is below `folder` behind the name `after`, a thousand objects at most."""
        ...

    def delete_all(self, names: Sequence[str]) -> None:
        """Removes objects; those that are not there are no error; raises as `delete`."""
        ...
