"""Decides which store an address means."""

from pathlib import Path

from serving.artifacts.object_store.directory import DirectoryStore
from serving.artifacts.object_store.store import ObjectStore, VersionedStore

BUCKETS = ("gs://", "s3://")


def is_bucket(address: str) -> bool:
    """Returns whether it names a bucket that is read over the network."""
    return address.startswith(BUCKETS)


def address_problem(address: str) -> str | None:
    """Returns the fault in a store's address; `None` if there is none. Pure."""
    if is_bucket(address):
        return None if address.split("://", 1)[1].strip("/") else "names no bucket"
    if "://" in address:
        return f"no store is reached by {address.split('://', 1)[0]}://"
    return None if address.startswith("/") else "a relative folder is another one on each host"


def bucket_problem(address: str) -> str | None:
    """Returns the fault in a bucket's address; `None` if there is none. Pure."""
    return address_problem(address) if is_bucket(address) else "no address of a bucket"


def open_store(address: str) -> ObjectStore:
    """Returns the store at an absolute folder, `gs://BUCKET/...` or `s3://BUCKET/...`.

    Raises:
        ValueError: it is none of these, or the cloud's client refuses its variables.
    """
    problem = address_problem(address)
    if problem is not None:
        raise ValueError(f"{address!r}: {problem}")
    return open_bucket(address) if is_bucket(address) else DirectoryStore(Path(address))


def open_bucket(address: str) -> VersionedStore:
    """Returns the store at `gs://BUCKET/...` or `s3://BUCKET/...`.

    Raises:
        ValueError: it is neither, or the cloud's client refuses its variables.
    """
    problem = bucket_problem(address)
    if problem is not None:
        raise ValueError(f"{address!r}: {problem}")
    # Imported here because it costs 15 MB of memory that a folder does without.
    from serving.artifacts.object_store.cloud import CloudStore  # noqa: PLC0415

    return CloudStore(address)
