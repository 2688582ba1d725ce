"""The contents of files as files of one folder.

Owns their names there. Content without a record of its file is nobody's; whoever keeps the records
says which there are (`store`).
"""

import contextlib
import os
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from serving.gateway.batches.sqlite.private import make_private_folder, open_new
from serving.gateway.batches.store import MissingFileError

# Content without a record is older than this when it is deleted: no upload takes as long.
_ORPHAN_S = 6 * 3600.0


class FileContent:
    """Content that is written into the folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"new-{uuid.uuid4().hex}"
        self._file = open_new(self.path)
        self.num_bytes = 0
        self._is_kept = False

    def write(self, data: bytes) -> None:
        """Appends."""
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self, path: Path) -> None:
        """Flushes it, and gives it its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.path.rename(path)
        self.path = path

    def discard(self) -> None:
        """Throws it away, unless it belongs to a file already."""
        self._file.close()
        if not self._is_kept:
            self.path.unlink(missing_ok=True)

    def belongs(self) -> None:
        """Notes that a file has it."""
        self._is_kept = True


class ContentFolder:
    """A folder of contents, one file each by the id of the file that has it."""

    def __init__(self, path: Path) -> None:
        """Makes the folder, if there is none; it is for its user alone."""
        make_private_folder(path)
        self._path = path

    def begin(self) -> FileContent:
        """Begins a content."""
        return FileContent(self._path)

    def keep(self, content: FileContent, file_id: str) -> None:
        """Flushes a content and gives it the name of its file, which has no record yet."""
        content.keep(self._path / file_id)

    def open(self, file_id: str) -> BinaryIO:
        """Opens the content of a file.

        Raises:
            MissingFileError: there is none.
        """
        try:
            return (self._path / file_id).open("rb")
        except FileNotFoundError as error:
            raise MissingFileError(file_id) from error

    def delete(self, file_id: str) -> None:
        """Deletes the content of a file. Idempotent."""
        (self._path / file_id).unlink(missing_ok=True)

    def sweep(self, kept: Collection[str], now_s: float) -> None:
        """Deletes what is old and belongs to none of the files that are `kept`."""
        for path in self._path.iterdir():
            # One that was deleted meanwhile is gone, as it should be.
            with contextlib.suppress(FileNotFoundError):
                if path.name not in kept and path.stat().st_mtime < now_s - _ORPHAN_S:
                    path.unlink()
