"""Objects in a GCS or S3 bucket, through obstore.

Owns the bounds of a request and the translation of errors. Does not own credentials: the client
finds them as the clouds' own tools do (Workload Identity or `GOOGLE_...` variables, `AWS_...`).
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from serving.artifacts.object_store.store import (
    ConflictError,
    MissingObjectError,
    ObjectVersion,
    StoredObject,
    StoreError,
    VersionedObject,
)

if TYPE_CHECKING:
    # Types that obstore has in its stubs only.
    from obstore import ObjectMeta, PutMode, UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

_T = TypeVar("_T")

# Bounds one request, and with `_RETRY` one object. The largest we expect, a program of some hundred
# MB, comes in seconds from a bucket of the same region. A caller with less time stops waiting.
_CLIENT: "ClientConfig" = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=60),
    # The clouds are asked by https; by http only where their own variables name such an endpoint.
    "allow_http": True,
}
_PAGE = 1000  # objects of one list request, and names of one that deletes
# Of a long upload, the bytes of a part and how many parts are under way.
_PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_ONCE = 4
# GCS lets an object be written once a second: the client's own waits of 0.1 s would give up first.
_RETRY: "RetryConfig" = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}


class CloudStore:
    """Stores objects in a bucket; see `VersionedStore`. Makes no request before the first call."""

    def __init__(self, address: str) -> None:
        """Makes the client; `address` is `gs://` or `s3://`, a bucket, and folders in it if wanted.

        Raises:
            ValueError: the client refuses the address or its own variables.
        """
        self._address = address.rstrip("/")
        kind = GCSStore if address.startswith("gs://") else S3Store
        try:
            self._client: GCSStore | S3Store = kind.from_url(
                self._address, client_options=_CLIENT, retry_config=_RETRY
            )
        except BaseError as error:
            raise ValueError(f"{address}: {_describe(error)}") from error

    def get(self, name: str) -> bytes:
        """Returns an object's bytes; see `ObjectStore.get`."""
        return self._ask(name, lambda: bytes(self._client.get(name).bytes()))

    def put(self, name: str, data: bytes) -> None:
        """Writes an object; see `ObjectStore.put`."""
        self._ask(name, lambda: self._client.put(name, data))

    def head(self, name: str) -> StoredObject | None:
        """Returns an object's description; see `ObjectStore.head`."""
        try:
            return self._ask(name, lambda: _described(self._client.head(name)))
        except MissingObjectError:
            return None

    def list(self, folder: str) -> list[StoredObject]:
        """Returns a folder's objects; see `ObjectStore.list`."""

        def found() -> list[StoredObject]:
            pages = self._client.list(f"{folder}/")
            return sorted(
                (_described(entry) for page in pages for entry in page),
                key=lambda stored: stored.name,
            )

        return self._ask(folder, found)

    def delete(self, name: str) -> None:
        """Removes an object; see `ObjectStore.delete`."""
        try:
            self._ask(name, lambda: self._client.delete(name))
        except MissingObjectError:
            return

    def read(self, name: str) -> VersionedObject:
        """Returns an object with its version; see `VersionedStore.read`."""

        def found() -> VersionedObject:
            result = self._client.get(name)
            version = ObjectVersion(result.meta["e_tag"], result.meta["version"])
            return VersionedObject(bytes(result.bytes()), version)

        return self._ask(name, found)

    def write_if(self, name: str, data: bytes, version: ObjectVersion | None) -> ObjectVersion:
        """Writes on a condition; see `VersionedStore.write_if`."""
        mode: PutMode = "create"
        if version is not None:
            parts = {"e_tag": version.e_tag, "version": version.generation}
            mode = cast("UpdateVersion", {k: v for k, v in parts.items() if v is not None})

        def written() -> ObjectVersion:
            result = self._client.put(name, data, mode=mode)
            return ObjectVersion(result["e_tag"], result["version"])

        return self._ask(name, written)

    def upload(self, name: str, content: BinaryIO) -> None:
        """Writes an object from a file; see `VersionedStore.upload`."""
        self._ask(
            name,
            lambda: self._client.put(
                name, content, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            ),
        )

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Returns a part of an object; see `VersionedStore.read_range`."""
        return self._ask(name, lambda: bytes(self._client.get_range(name, start=begin, end=end)))

    def list_from(self, folder: str, after: str = "") -> Sequence[StoredObject]:
        """Returns the first objects behind a name; see `VersionedStore.list_from`."""

        def found() -> list[StoredObject]:
            pages = self._client.list(f"{folder}/", offset=after or None, chunk_size=_PAGE)
            return [_described(entry) for entry in next(iter(pages), [])]

        return self._ask(folder, found)

    def delete_all(self, names: Sequence[str]) -> None:
        """Removes objects; see `VersionedStore.delete_all`."""
        for first in range(0, len(names), _PAGE):
            page = list(names[first : first + _PAGE])
            try:
                self._ask(page[0], lambda page=page: self._client.delete(page))  # type: ignore[misc]
            except MissingObjectError:
                for name in page:
                    self.delete(name)

    def _ask(self, name: str, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except (AlreadyExistsError, PreconditionError) as error:
            raise ConflictError(f"{self._address}/{name}: {_describe(error)}") from error
        except FileNotFoundError as error:
            raise MissingObjectError(f"{self._address}/{name}: no such object") from error
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(f"{self._address}/{name}: {_describe(error)}") from error


def _described(meta: "ObjectMeta") -> StoredObject:
    return StoredObject(
        meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"]
    )


def _describe(error: Exception) -> str:
    """Returns the first line of the client's message; below it are its own internals."""
    return (str(error).splitlines() or [type(error).__name__])[0]
