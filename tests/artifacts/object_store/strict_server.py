"""A server on loopback that keeps the conditions of GCS and S3 as their documents have them.

moto, which the other tests ask, looks at S3's conditions and writes afterwards, so that of two
writers both may win, and knows nothing of GCS's. This one decides and writes at once, and can do
what buckets do to their clients: lose an answer of which the work is done, and refuse the second
write to an object within a second.

By cloud.google.com/storage/docs/xml-api (x-goog-if-generation-match, x-goog-generation) and by
docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html, as read in November 2026.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_PAGE = 1000


@dataclass
class StrictBucket:
    """What is in the bucket, and what it does to its clients.

    `lose_every`: of so many writes on a condition the answer to the last is lost. `writes_apart_s`:
    a write to an object that was written less long ago is refused.
    """

    url: str = ""
    lose_every: int | None = None
    writes_apart_s: float = 0.0
    objects: dict[str, tuple[bytes, int, float]] = field(default_factory=dict)
    num_lost: int = 0
    num_refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    _num_conditional: int = 0
    _generation: int = 0

    def put(self, key: str, data: bytes, headers: dict[str, str]) -> tuple[int, bool]:
        """Writes an object; returns the status, and whether its answer is lost."""
        with self.lock:
            there = self.objects.get(key)
            if not self._holds(there, headers):
                return 412, False
            now_s = time.time()
            if there is not None and now_s - there[2] < self.writes_apart_s:
                self.num_refused += 1
                return 429, False
            self._generation += 1
            self.objects[key] = (data, self._generation, now_s)
            if not any(name in headers for name in _CONDITIONS):
                return 200, False
            self._num_conditional += 1
            is_lost = self.lose_every is not None and self._num_conditional % self.lose_every == 0
            self.num_lost += is_lost
            return 200, is_lost

    @staticmethod
    def _holds(there: tuple[bytes, int, float] | None, headers: dict[str, str]) -> bool:
        wanted = headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (0 if there is None else there[1]):
            return False
        if "if-none-match" in headers and there is not None:
            return False
        tag = headers.get("if-match")
        return tag is None or (there is not None and tag.strip('"') == _tag(there[0]))


_CONDITIONS = ("x-goog-if-generation-match", "if-none-match", "if-match")


@contextmanager
def strict_server() -> Iterator[StrictBucket]:
    """An empty bucket, served."""
    bucket = StrictBucket()

    class Handler(_Handler):
        pass

    Handler.bucket = bucket
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    bucket.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def _tag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: StrictBucket

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, is_lost = self.bucket.put(self._key, data, headers)
        if is_lost:
            self.close_connection = True
            return
        self._answer(status, b"", self._facts())

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query or "prefix" in query:
            self._answer(200, self._listed(query))
            return
        with self.bucket.lock:
            found = self.bucket.objects.get(self._key)
        if found is None:
            self._answer(404, b"")
            return
        data, status, facts = found[0], 200, self._facts()
        if wanted := self.headers.get("range"):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            last = min(int(end or len(data)), len(data) - 1)
            facts["content-range"] = f"bytes {begin}-{last}/{len(data)}"
            data, status = data[int(begin) : last + 1], 206
        self._answer(status, data, facts)

    def do_HEAD(self) -> None:
        with self.bucket.lock:
            found = self.bucket.objects.get(self._key)
        self._answer(404 if found is None else 200, b"" if found is None else found[0])

    def do_DELETE(self) -> None:
        with self.bucket.lock:
            found = self.bucket.objects.pop(self._key, None)
        self._answer(404 if found is None and self._is_gcs else 204, b"")

    def do_POST(self) -> None:
        """S3's deletion of many objects."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        keys = [each.text or "" for each in ElementTree.fromstring(body).iter() if _is(each, "Key")]
        bucket = urlsplit(self.path).path.strip("/")
        with self.bucket.lock:
            for key in keys:
                self.bucket.objects.pop(f"{bucket}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    @property
    def _is_gcs(self) -> bool:
        return "bearer" in self.headers.get("authorization", "").lower()

    def _facts(self) -> dict[str, str]:
        with self.bucket.lock:
            found = self.bucket.objects.get(self._key)
        if found is None:
            return {}
        return {
            "etag": f'"{_tag(found[0])}"',
            "x-goog-generation": str(found[1]),
            "last-modified": formatdate(found[2], usegmt=True),
        }

    def _listed(self, query: dict[str, list[str]]) -> bytes:
        bucket = self._key.strip("/")
        prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        with self.bucket.lock:
            keys = sorted(key for key in self.bucket.objects if key.startswith(prefix))
            keys = [key for key in keys if key.removeprefix(f"{bucket}/") > after]
            page = [(key, self.bucket.objects[key]) for key in keys[:_PAGE]]
        entries = "".join(
            f"<Contents><Key>{escape(key.removeprefix(f'{bucket}/'))}</Key>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(at_s))}"
            f"</LastModified><ETag>&quot;{_tag(data)}&quot;</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
            for key, (data, _, at_s) in page
        )
        more = ""
        if len(keys) > _PAGE:
            last = escape(page[-1][0].removeprefix(f"{bucket}/"))
            more = f"<NextContinuationToken>{last}</NextContinuationToken>"
        is_cut = str(len(keys) > _PAGE).lower()
        return (
            f"<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>{more}{entries}"
            "</ListBucketResult>"
        ).encode()

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.command == "HEAD":
            for name, value in self._facts().items():
                self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _is(element: ElementTree.Element, name: str) -> bool:
    return element.tag.rpartition("}")[2] == name
