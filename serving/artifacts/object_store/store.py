"""The seam behind which a folder, a GCS bucket and an S3 bucket look alike.

Owns the protocol and its errors. Does not own which store an address means (`address`), nor what is
kept there. Names are relative, parts joined by `/`; an implementation never leaves its prefix.
"""

from dataclasses import dataclass
from typing import Protocol


class StoreError(Exception):
    """The store did not do what was asked: unreachable, refused, full. Go on without it."""


class MissingObjectError(StoreError):
    """There is no object of this name. Do not retry."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a store says of one object. `modified_s` is wall-clock time by the store's clock.

    `version` changes with the content; `None` where the store does not say.
    """

    name: str
    num_bytes: int
    modified_s: float
    version: str | None = None


class ObjectStore(Protocol):
    """Blocking calls, safe from several threads and from several machines at once."""

    @property
    def address(self) -> str:
        """As `open_store` was given it."""
        ...

    def get(self, name: str) -> bytes:
        """The whole object.

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
        """What the store says of it; `None` if there is none.

        Raises:
            StoreError: the store did not say.
        """
        ...

    def list(self, folder: str) -> list[StoredObject]:
        """All objects below `folder`, at any depth, by name; none where there is no such folder.

        Raises:
            StoreError: the store did not say.
        """
        ...

    def delete(self, name: str) -> None:
        """Removes an object; one that is not there is no error.

        Raises:
            StoreError: it may still be there.
        """
        ...
