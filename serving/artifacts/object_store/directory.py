"""Objects as files below a folder: a disk, a shared file system, or a bucket mounted by GCS FUSE.

A write goes to a file beside its place, which is then renamed: a reader on the same file system
sees whole objects only. Through GCS FUSE the upload itself is whole or not at all.
"""

import os
import uuid
from pathlib import Path

from serving.artifacts.object_store.store import MissingObjectError, StoredObject, StoreError

# The prefix of files that are being written. No object's name begins with it.
_UNFINISHED = ".writing-"


class DirectoryStore:
    """Stores objects in a folder, made with the first write; see `ObjectStore`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> bytes:
        """Returns an object's bytes; see `ObjectStore.get`."""
        path = self._path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise MissingObjectError(f"{path}: no such object") from error
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error

    def put(self, name: str, data: bytes) -> None:
        """Writes an object; see `ObjectStore.put`."""
        path = self._path(name)
        unfinished = path.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(data)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error

    def head(self, name: str) -> StoredObject | None:
        """Returns an object's description; see `ObjectStore.head`."""
        path = self._path(name)
        try:
            return _described(name, path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error

    def list(self, folder: str) -> list[StoredObject]:
        """Returns a folder's objects; see `ObjectStore.list`."""
        found: list[StoredObject] = []
        root = self._path(folder)
        try:
            if not root.is_dir():
                return []
            for path in root.rglob("*"):
                if path.name.startswith(_UNFINISHED) or path.is_dir():
                    continue
                stored = self.head(path.relative_to(self._folder).as_posix())
                if stored is not None:
                    found.append(stored)
        except OSError as error:
            raise StoreError(f"{root}: {error}") from error
        return sorted(found, key=lambda stored: stored.name)

    def delete(self, name: str) -> None:
        """Removes an object; see `ObjectStore.delete`."""
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if not all(parts) or any(part in (".", "..") for part in parts):
            raise ValueError(f"not the name of an object: {name!r}")
        return self._folder.joinpath(*parts)


def _described(name: str, stat: os.stat_result) -> StoredObject:
    version = f"{stat.st_mtime_ns}-{stat.st_size}"
    return StoredObject(name, stat.st_size, stat.st_mtime, version)
