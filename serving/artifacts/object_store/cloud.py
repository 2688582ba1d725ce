"""Objects in a GCS or S3 bucket, through obstore.

Owns the bounds of a request and the translation of errors. Does not own credentials: the client
finds them as the clouds' own tools do (Workload Identity or `GOOGLE_...` variables, `AWS_...`).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from serving.artifacts.object_store.store import MissingObjectError, StoredObject, StoreError

if TYPE_CHECKING:
    # Types that obstore has in its stubs only.
    from obstore import ObjectMeta
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
_RETRY: "RetryConfig" = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


class CloudStore:
    """Stores objects in a bucket; see `ObjectStore`. It makes no request before the first call."""

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

    def _ask(self, name: str, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
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
