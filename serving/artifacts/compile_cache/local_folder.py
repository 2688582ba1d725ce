"""Reads, writes and checks JAX's own files of compiled programs on one host.

JAX writes a file in place and never again over one that is there (jax 0.10.2 `lru_cache.py`, read
2026-11-22): a file cut short by a kill would make each later start compile that program again, for
ever. So a file that is not whole is removed before an engine starts, and never leaves this host.
"""

import contextlib
import uuid
import zlib
from pathlib import Path

from serving.artifacts.compile_cache.layout import ENTRY_SUFFIX

try:
    # JAX compresses with it where it is installed, and with zlib where not.
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1024 * 1024
_UNFINISHED = ".pulling-"


class LocalFolder:
    """The folder of one key on this host. `OSError` of its calls means that the disk fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each program's file, by JAX's name of it."""
        sizes = {}
        if self.path.is_dir():
            for path in self.path.iterdir():
                if path.name.endswith(ENTRY_SUFFIX) and not path.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        sizes[path.name] = path.stat().st_size
        return sizes

    def read(self, name: str) -> bytes | None:
        """Returns the file; `None` if it is gone."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes or replaces a file; JAX sees all of it or none."""
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(self.path / name)
        finally:
            unfinished.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Removes a file; one that is gone is no error."""
        (self.path / name).unlink(missing_ok=True)


def is_whole(data: bytes) -> bool:
    """Returns whether the bytes are a whole compressed stream, as JAX writes it. Pure.

    A stream of a kind that this host cannot read is not: JAX here could not read it either.
    """
    if data.startswith(_ZSTD_MAGIC):
        return zstandard is not None and _is_whole_zstd(data)
    stream = zlib.decompressobj()
    try:
        for start in range(0, len(data), _CHUNK_BYTES):
            stream.decompress(data[start : start + _CHUNK_BYTES])
    except zlib.error:
        return False
    return stream.eof and not stream.unused_data


def _is_whole_zstd(data: bytes) -> bool:
    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        for start in range(0, len(data), _CHUNK_BYTES):
            stream.decompress(data[start : start + _CHUNK_BYTES])
    except zstandard.ZstdError:
        return False
    return bool(stream.eof)
