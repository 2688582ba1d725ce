"""A bucket in memory, which a test may interrupt. Held to the contract of the real clients."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

from serving.artifacts.object_store.store import (
    ConflictError,
    MissingObjectError,
    ObjectVersion,
    StoredObject,
    VersionedObject,
)

_T = TypeVar("_T")
_PAGE = 1000


class MemoryStore:
    """Objects in memory. Implements `VersionedStore`.

    `interrupt` is called before and after each call that changes something, with its name and the
    object's; what it raises is raised.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int, float]] = {}
        self.interrupt: Callable[[str, str], None] = lambda _call, _name: None
        self.clock: Callable[[], float] = time.time
        self.num_writes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._generation = 0

    def get(self, name: str) -> bytes:
        return self.read(name).data

    def read(self, name: str) -> VersionedObject:
        with self._lock:
            if name not in self.objects:
                raise MissingObjectError(f"{name}: no such object")
            data, generation, _ = self.objects[name]
        return VersionedObject(data, ObjectVersion(None, str(generation)))

    def put(self, name: str, data: bytes) -> None:
        self._change("put", name, lambda: self._write(name, data))

    def upload(self, name: str, content: BinaryIO) -> None:
        data = content.read()
        self._change("upload", name, lambda: self._write(name, data))

    def write_if(self, name: str, data: bytes, version: ObjectVersion | None) -> ObjectVersion:
        def written() -> ObjectVersion:
            found = self.objects.get(name)
            there = None if found is None else ObjectVersion(None, str(found[1]))
            if there != version:
                raise ConflictError(f"{name}: {there}, not {version}")
            return self._write(name, data)

        return self._change("write_if", name, written)

    def head(self, name: str) -> StoredObject | None:
        with self._lock:
            found = self.objects.get(name)
        if found is None:
            return None
        return StoredObject(name, len(found[0]), found[2], str(found[1]))

    def list(self, folder: str) -> list[StoredObject]:
        with self._lock:
            below = sorted(name for name in self.objects if name.startswith(f"{folder}/"))
        return [stored for name in below if (stored := self.head(name)) is not None]

    def list_from(self, folder: str, after: str = "") -> Sequence[StoredObject]:
        return [each for each in self.list(folder) if each.name > after][:_PAGE]

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        return self.get(name)[begin:end]

    def delete(self, name: str) -> None:
        self._change("delete", name, lambda: self.objects.pop(name, None))

    def delete_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def _change(self, call: str, name: str, change: Callable[[], _T]) -> _T:
        self.interrupt(call, name)
        with self._lock:
            done = change()
        self.interrupt(call, name)
        return done

    def _write(self, name: str, data: bytes) -> ObjectVersion:
        self._generation += 1
        self.objects[name] = (data, self._generation, self.clock())
        self.num_writes[name] = self.num_writes.get(name, 0) + 1
        return ObjectVersion(None, str(self._generation))
