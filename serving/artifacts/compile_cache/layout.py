"""The layout of a store of compiled programs, and the contents of a manifest. Pure.

    v1/blobs/DI/DIGEST                       one program, named by the SHA-256 of its bytes
    v1/keys/FAMILY/KEY/key.json              the parts of the key
    v1/keys/FAMILY/KEY/used                  its time is when an engine last pulled
    v1/keys/FAMILY/KEY/manifests/NAME.json   what one writer added at one time

A manifest is written once, after its blobs, under a name that nobody else has. So writers never
wait for one another, and a reader takes the union of what it finds. Two writers may name a program
with different bytes: XLA's output need not repeat itself. Either will do; the newest comes first.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = "v1"
BLOBS = f"{ROOT}/blobs"
KEYS = f"{ROOT}/keys"
# How JAX names the files of its cache. Source: jax 0.10.2 `lru_cache.py`, read 2026-11-22.
ENTRY_SUFFIX = "-cache"


class DamagedManifestError(ValueError):
    """Reports an invalid manifest. The programs it named count as missing."""


class ProgramEntry(BaseModel):
    """The entry of one program: JAX's name of its file, and the bytes that belong there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # Becomes a file on a host: it may lead nowhere else.
    name: Annotated[str, Field(pattern=r"^[^./\x00-\x1f][^/\x00-\x1f]{0,240}-cache$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    num_bytes: Annotated[int, Field(ge=0)]


class Manifest(BaseModel):
    """The programs one writer added at one time. `written_at_s` is wall-clock time by its clock."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    writer: str
    written_at_s: float
    entries: Annotated[tuple[ProgramEntry, ...], Field(strict=False)]


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The place of one key's objects."""

    family: str
    digest: str

    @property
    def family_folder(self) -> str:
        """The folder of all keys of the family."""
        return f"{KEYS}/{self.family}"

    @property
    def folder(self) -> str:
        """The folder of everything of the key but its blobs."""
        return f"{self.family_folder}/{self.digest}"

    @property
    def record(self) -> str:
        """The name of the object with the parts of the key."""
        return f"{self.folder}/key.json"

    @property
    def used(self) -> str:
        """The name of an empty object, written when an engine pulls."""
        return f"{self.folder}/used"

    @property
    def manifests(self) -> str:
        """The folder of manifests."""
        return f"{self.folder}/manifests"


def place_in(name: str) -> KeyPlace | None:
    """Returns the key that an object below `KEYS` belongs to; `None` if it is none of ours."""
    parts = name.split("/")
    return KeyPlace(parts[2], parts[3]) if len(parts) > 4 and name.startswith(KEYS) else None


def is_manifest(name: str) -> bool:
    """Returns whether an object is a manifest, by its name."""
    return "/manifests/" in name and name.endswith(".json")


def blob_name(digest: str) -> str:
    """Returns the name of the blob with this SHA-256."""
    return f"{BLOBS}/{digest[:2]}/{digest}"


def content_digest(data: bytes) -> str:
    """Returns the SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(data: bytes) -> Manifest:
    """Returns a manifest from its bytes.

    Raises:
        DamagedManifestError: they are none.
    """
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise DamagedManifestError(f"{error.error_count()} faults in a manifest") from error


def union(manifests: Iterable[Manifest]) -> dict[str, tuple[ProgramEntry, ...]]:
    """Returns for each program its different bytes, those of the newest manifest first."""
    found: dict[str, dict[str, ProgramEntry]] = {}
    for manifest in sorted(manifests, key=lambda m: (-m.written_at_s, m.writer)):
        for entry in manifest.entries:
            found.setdefault(entry.name, {}).setdefault(entry.digest, entry)
    return {name: tuple(entries.values()) for name, entries in found.items()}


def digests(known: Mapping[str, tuple[ProgramEntry, ...]]) -> set[str]:
    """Returns all blobs that a union names."""
    return {entry.digest for entries in known.values() for entry in entries}
