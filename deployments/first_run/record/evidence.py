"""Writes the files of a run at once: to a folder here, and to a bucket where one is named.

Owns that nothing is lost that one of both could take, the masking of secrets, and the archive. What
fails to be written is kept as a fault and tried again with the next file: the run goes on.
"""

import contextlib
import errno
import io
import os
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from deployments.first_run.record.masking import mask
from serving.artifacts.object_store.store import ObjectStore, StoreError

ARCHIVE = "first-run.tar.gz"
# Freed when the disk is full, so that results, verdict and archive still find room. Logs are left
# out from then on.
RESERVE_BYTES = 2 * 1024**2
_SMALL_BYTES = 64 * 1024
_RESERVE = ".reserve"
# The most of one file: the end of a log says how it ended.
MAX_FILE_BYTES = 4 * 1024**2


class EvidenceFolder:
    """The files of one run, by name. `store` is `None` where the folder is all there is."""

    def __init__(
        self,
        folder: Path,
        store: ObjectStore | None,
        secrets: Iterable[str],
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """Makes the folder.

        Raises:
            OSError: nothing can be written there. Name another folder.
        """
        self.folder = folder
        self._store = store
        self._secrets = tuple(secrets)
        self._contents: dict[str, bytes] = {}
        self._unsynced: set[str] = set()
        self._faults: dict[str, str] = {}
        self._is_full = False
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a small disk: then there is no reserve
            _write(folder / _RESERVE, b"\0" * reserve_bytes)

    @property
    def faults(self) -> tuple[str, ...]:
        """What could not be written until now, and why."""
        return tuple(self._faults.values())

    def write(self, name: str, text: str) -> None:
        """Writes a file, masked, to every place; an earlier one of that name is replaced."""
        data = mask(text, self._secrets).encode()
        if len(data) > MAX_FILE_BYTES:
            data = b"[the beginning is left out]\n" + data[-MAX_FILE_BYTES:]
        self._put(name, data)
        self.sync()

    def sync(self) -> None:
        """Brings to the store what it does not have yet."""
        if self._store is None:
            return
        for name in sorted(self._unsynced):
            try:
                self._store.put(name, self._contents[name])
            except StoreError as error:
                self._faults["store"] = f"not in the store: {name} and what followed ({error})"
                return
            self._unsynced.discard(name)
        self._faults.pop("store", None)

    def archive(self) -> Path | None:
        """Writes one file with all others; its path, or `None` if the folder did not take it.

        What the folder had no room for is not in the archive there either.
        """
        self._contents[ARCHIVE] = _archived(self._contents)
        self._unsynced.add(ARCHIVE)
        self._put_here(ARCHIVE, self._contents[ARCHIVE])
        if ARCHIVE in self._faults:
            here = {name: data for name, data in self._contents.items() if name not in self._faults}
            self._put_here(ARCHIVE, _archived(here))
        self.sync()
        return self.folder / ARCHIVE if ARCHIVE not in self._faults else None

    @property
    def has_archive(self) -> bool:
        """Whether the folder has an archive."""
        return ARCHIVE in self._contents and ARCHIVE not in self._faults

    def archive_elsewhere(self) -> Path | None:
        """Writes the archive below the machine's temporary folder; `None`: no room there either.

        It has everything, because what is written is kept until the end.
        """
        try:
            path = Path(tempfile.mkdtemp(prefix="first-run-")) / ARCHIVE
            _write(path, _archived(self._contents))
        except OSError:
            return None
        return path

    def close(self) -> None:
        """Gives the reserve back."""
        (self.folder / _RESERVE).unlink(missing_ok=True)

    def _put(self, name: str, data: bytes) -> None:
        self._contents[name] = data
        self._unsynced.add(name)
        self._put_here(name, data)

    def _put_here(self, name: str, data: bytes) -> None:
        may_use_reserve = len(data) <= _SMALL_BYTES or name == ARCHIVE
        try:
            if self._is_full and not may_use_reserve:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            try:
                _write(self.folder / name, data)
            except OSError:
                self._is_full = True
                if not may_use_reserve:
                    raise
                self.close()
                _write(self.folder / name, data)
            self._faults.pop(name, None)
        except OSError as error:
            self._faults[name] = f"not in {self.folder}: {name} ({error.strerror or error})"


def _archived(contents: Mapping[str, bytes]) -> bytes:
    """Returns an archive of all files but the archive itself."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in sorted(contents.items()):
            if name != ARCHIVE:
                entry = tarfile.TarInfo(f"first-run/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, and returns once the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
