"""Files and folders that only their user may read, whatever the folder above them allows."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_DATABASE_SUFFIXES = ("", "-wal", "-shm")


def make_private_folder(path: Path) -> None:
    """Makes a folder, or takes the rights of others from one that is there and is its user's.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(exist_ok=True, mode=_FOLDER_MODE)
    _keep_private(path, _FOLDER_MODE)


def make_private_database(path: Path) -> None:
    """Makes the empty file of a database, or takes the rights of others from one that is there.

    One that is there is not opened: to close it again would end this process's locks of it. The
    files that SQLite makes beside it have its rights.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        open_new(path).close()
    for suffix in _DATABASE_SUFFIXES:
        _keep_private(path.with_name(path.name + suffix), _FILE_MODE)


def open_new(path: Path) -> BinaryIO:
    """Opens a file to write that is not there yet.

    Raises:
        FileExistsError: it is.
    """
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _FILE_MODE), "wb")


def _keep_private(path: Path, mode: int) -> None:
    """Takes the rights of others from what is there, if it is this user's own."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        if found.st_uid == os.geteuid():
            path.chmod(found.st_mode & mode)
