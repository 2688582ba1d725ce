"""Contents of files: collected in a file of this host, then uploaded whole; read in parts."""

import io
import tempfile
import uuid
from typing import BinaryIO

from serving.artifacts.object_store.store import VersionedStore
from serving.gateway.batches.bucket.names import content_name

# What is kept of an upload in memory; the rest is in a file without a name.
_MEMORY_BYTES = 1024 * 1024
_READ_BYTES = 1024 * 1024


class BucketContent:
    """Content that is being written. Implements `NewContent`."""

    def __init__(self, store: VersionedStore) -> None:
        self.content_id = uuid.uuid4().hex
        self.num_bytes = 0
        self._store = store
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 - see `discard`
        self._is_uploaded = self._is_kept = False

    def write(self, data: bytes) -> None:
        """Appends."""
        self._file.write(data)
        self.num_bytes += len(data)

    def upload(self) -> None:
        """Writes it into the bucket, where nothing names it yet."""
        self._is_uploaded = True
        with self._file:
            self._file.seek(0)
            # The client takes a file, and this may be a buffer yet.
            self._file.rollover()
            self._store.upload(content_name(self.content_id), self._file)  # type: ignore[arg-type]

    def belongs(self) -> None:
        """Notes that a file has it."""
        self._is_kept = True

    def discard(self) -> None:
        """Throws it away, unless it belongs to a file already."""
        self._file.close()
        if self._is_uploaded and not self._is_kept:
            self._is_uploaded = False
            self._store.delete(content_name(self.content_id))


class _ObjectReader(io.RawIOBase):
    """Reads an object of known length a part at a time."""

    def __init__(self, store: VersionedStore, name: str, num_bytes: int) -> None:
        self._store, self._name, self._num_bytes = store, name, num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._num_bytes)
        if end <= self._at:
            return 0
        data = self._store.read_range(self._name, self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_content(store: VersionedStore, content_id: str, num_bytes: int) -> BinaryIO:
    """Opens a content that is so long."""
    reader = _ObjectReader(store, content_name(content_id), num_bytes)
    return io.BufferedReader(reader, _READ_BYTES)
