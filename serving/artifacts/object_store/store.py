"""The seam that makes a folder, a GCS bucket and an S3 bucket interchangeable.

Owns the protocol and its errors. Does not own which store an address means (`address`), nor what is
kept there. Names are relative, parts joined by `/`; an implementation never leaves its prefix.
"""

from dataclasses import dataclass
from typing import Protocol


class StoreError(Exception):
    """Reports a failed call of the store: unreachable, refused, full. Go on without it."""


class MissingObjectError(StoreError):
    """Reports that there is no object of this name. Do not retry."""


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
