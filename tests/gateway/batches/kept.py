"""What keeps a batch lane in tests: a folder, and a bucket in memory."""

from pathlib import Path
from typing import Protocol

from serving.artifacts.object_store.store import VersionedStore
from serving.gateway.batches.bucket.names import CONTENTS
from serving.gateway.batches.bucket.store import BucketBatchStore
from serving.gateway.batches.sqlite.store import SqliteBatchStore
from serving.gateway.batches.store import BatchStore
from tests.artifacts.object_store.memory_store import MemoryStore


class Kept(Protocol):
    """The place where a lane is kept, which several gateways open."""

    def open(self) -> BatchStore: ...

    def num_contents(self) -> int:
        """How many contents there are, whether or not a file has them."""
        ...


class KeptInFolder:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> SqliteBatchStore:
        return SqliteBatchStore(self.folder)

    def num_contents(self) -> int:
        return len(list((self.folder / "files").iterdir()))


class KeptInBucket:
    """A bucket in memory, which is as patient as a folder."""

    def __init__(self) -> None:
        self.bucket = MemoryStore()

    def open(self) -> BucketBatchStore:
        return BucketBatchStore(self.bucket, write_interval_s=0.0)

    def num_contents(self) -> int:
        return len(self.bucket.list(CONTENTS))


class KeptAtServer:
    """A bucket of a server, at the pace of production."""

    def __init__(self, bucket: VersionedStore) -> None:
        self._bucket = bucket

    def open(self) -> BucketBatchStore:
        return BucketBatchStore(self._bucket)

    def num_contents(self) -> int:
        return len(self._bucket.list(CONTENTS))


KINDS = ("folder", "bucket")


def kept_in(kind: str, folder: Path) -> Kept:
    """An empty place of one of `KINDS`."""
    return KeptInFolder(folder) if kind == "folder" else KeptInBucket()
