"""A real S3 server on loopback, and stores on it.

GCS is asked through its own client as well, at the same server: the XML interface that the client
speaks is S3's for what we use. That shows our calls and the client's requests, not GCS itself.
"""

import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.artifacts.object_store.address import open_bucket, open_store
from serving.artifacts.object_store.store import ObjectStore, VersionedStore

from .memory_store import MemoryStore
from .strict_server import StrictBucket, strict_server

BUCKET = "programs"
CLOUDS = ("s3", "gs")
# moto knows nothing of GCS's conditions.
BUCKETS = ("moto-s3", "strict-s3", "strict-gs")
# The server finds out from this header that S3 is meant; it checks nothing.
_ANY_TOKEN = "Credential=any/20260101/us-east-1/s3/aws4_request"


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with one empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        yield url
    finally:
        server.stop()


def client_variables(url: str) -> dict[str, str]:
    """What the clouds' own clients read, so that both ask the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "GOOGLE_BASE_URL": url,
        "GOOGLE_BEARER_TOKEN": _ANY_TOKEN,
    }


@pytest.fixture(scope="session")
def store_server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="session")
def strict_bucket() -> Iterator[StrictBucket]:
    with strict_server() as bucket:
        yield bucket


@pytest.fixture(params=["memory", *(pytest.param(k, marks=pytest.mark.process) for k in BUCKETS)])
def versioned_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> VersionedStore:
    """An empty bucket of each kind in turn: one in memory, S3's and GCS's clients at servers."""
    if request.param == "memory":
        return MemoryStore()
    server, kind = request.param.split("-")
    if server == "moto":
        url = request.getfixturevalue("store_server")
    else:
        url = request.getfixturevalue("strict_bucket").url
    return bucket_at(url, kind, monkeypatch)


def bucket_at(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> VersionedStore:
    """An empty bucket of a server."""
    for name, value in client_variables(url).items():
        monkeypatch.setenv(name, value)
    return open_bucket(f"{kind}://{BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture(params=["folder", *(pytest.param(k, marks=pytest.mark.process) for k in CLOUDS)])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    """An empty store of each kind in turn."""
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    url = request.getfixturevalue("store_server")
    for name, value in client_variables(url).items():
        monkeypatch.setenv(name, value)
    return open_store(f"{request.param}://{BUCKET}/{uuid.uuid4().hex}")
