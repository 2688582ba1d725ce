"""A way to the API server on which requests are seen, and which a test can spoil.

TLS ends here. Every request is kept, with who made it and what came of it, and passed on over a
connection of its own, its answer as it comes. On command other answers are given, and connections
are cut or held up. Runs on an event loop of its own; tests of any kind may use it.
"""

import asyncio
import contextlib
import gc
import json
import ssl
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

from .server import ControlPlane

_HEAD_END = b"\r\n\r\n"
_CHUNK_BYTES = 64 * 1024
_WITHIN_S = 120.0
_T = TypeVar("_T")


@dataclass(slots=True)
class Request:
    """One request. `verb` is Kubernetes', `target` is path and query as they came.

    `body` is `None` for a request without one, and `status` until there is an answer.
    """

    user: str
    verb: str
    resource: str
    name: str
    target: str
    body: Any
    status: int | None = None


@dataclass(slots=True)
class Fault:
    """An answer given instead of the right one, `times` times, to requests with this verb.

    With `part` only to those with it in their target. `lands` says whether what was asked for is
    done all the same.
    """

    verb: str
    status: int
    times: int = 1
    part: str = ""
    retry_after_s: int | None = None
    lands: bool = False

    def answer(self) -> bytes:
        """As HTTP has it."""
        fields = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.status}
        body = json.dumps(fields | {"message": "injected by the test"}).encode()
        lines = [f"HTTP/1.1 {self.status} Injected", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.retry_after_s is not None:
            lines.append(f"Retry-After: {self.retry_after_s}")
        return "\r\n".join(lines).encode() + _HEAD_END + body


class Proxy:
    """Stands before a control plane's API server. A context manager; `url` is where.

    Callers are known by bearer token or by client certificate: `know` gives a name to a token, and
    lets the bearer of a certificate of that name in by the token. `page_size` bounds what one
    answer lists; `None` leaves it to the caller.
    """

    def __init__(self, plane: ControlPlane, page_size: int | None = None) -> None:
        self.ca_file = plane.ca_file
        self._server = urlsplit(plane.url)
        self._to_server = ssl.create_default_context(cafile=str(plane.ca_file))
        self._page_size = page_size
        self._names: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._interposed: list[tuple[str, Callable[[Any], bool]]] = []
        self._requests: list[Request] = []
        self._lock = threading.Lock()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*plane.authority.server())
        self._context.load_verify_locations(plane.ca_file)
        self._context.verify_mode = ssl.CERT_OPTIONAL
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_down = False

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._listener = self._run(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context, limit=_CHUNK_BYTES)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WITHIN_S)
        self._loop.close()
        with warnings.catch_warnings():
            # A client that still shook hands is nobody's, and would be held against a later test.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The same as a URL."""
        return f"https://127.0.0.1:{self.port}"

    def know(self, name: str, token: str) -> None:
        """Who has this token is called so, and so is who has a certificate of this name."""
        with self._lock:
            self._names[token] = name

    # -- what was asked --

    def requests(self, user: str | None = None, verb: str | None = None) -> list[Request]:
        """What was asked so far, in order."""
        with self._lock:
            found = list(self._requests)
        return [each for each in found if user in (None, each.user) and verb in (None, each.verb)]

    def watches(self, resource: str) -> list[Request]:
        """The requests to watch a resource."""
        return [each for each in self.requests(verb="watch") if each.resource == resource]

    def lists(self, resource: str) -> list[Request]:
        """The requests for a page of a resource."""
        return [each for each in self.requests(verb="list") if each.resource == resource]

    def forget_requests(self) -> None:
        """What was asked so far is not shown any more."""
        with self._lock:
            self._requests.clear()

    # -- what is spoiled --

    def inject(self, fault: Fault) -> None:
        """The next requests that it means are answered so."""
        with self._lock:
            self._faults.append(fault)

    def interpose(self, verb: str, act: Callable[[Any], bool]) -> None:
        """Calls `act` with the body of each request of this verb before it is passed on.

        It ends with the first call that returns true. It is called on a thread, and may wait.
        """
        with self._lock:
            self._interposed.append((verb, act))

    def forget_faults(self) -> None:
        """No request is answered so any more."""
        with self._lock:
            self._faults.clear()

    def cut(self) -> None:
        """Ends every open connection in the midst of what it carries."""
        self._run(self._cut())

    def go_down(self) -> None:
        """Cuts, and ends every connection that is made from now on."""
        self._is_down = True
        self.cut()

    def come_back(self) -> None:
        """Ends what `go_down` or `hold` began."""
        self._is_down = False
        self._loop.call_soon_threadsafe(self._flows.set)

    def hold(self) -> None:
        """Passes nothing on from now on, and ends no connection."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    # -- on its own loop --

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WITHIN_S)

    async def _end(self) -> None:
        self._listener.close()
        await self._cut()
        await self._listener.wait_closed()

    async def _cut(self) -> None:
        open_now = list(self._open)
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if not self._is_down:
                await self._pass_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a cut, or a client that is gone
        finally:
            self._open.discard(task)
            await _abort(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(_HEAD_END)
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        user, token = self._caller(headers, writer)
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        asked = _request_of(user, method, target, body)
        await asyncio.to_thread(self._act, asked)
        fault = self._note(asked)
        if fault is None or fault.lands:
            headers["connection"] = "close"
            request = _head_of(method, self._bounded(target), headers) + body
            await self._ask_server(asked, request, writer if fault is None else None)
        if fault is not None:
            asked.status = fault.status
            writer.write(fault.answer())
        await self._flows.wait()
        await writer.drain()
        writer.close()
        with contextlib.suppress(ssl.SSLError):
            await writer.wait_closed()

    async def _ask_server(
        self, asked: Request, request: bytes, writer: asyncio.StreamWriter | None
    ) -> None:
        """Passes the answer on to `writer` as it comes; to nobody if there is none."""
        host, port = self._server.hostname, self._server.port
        from_server, to_server = await asyncio.open_connection(host, port, ssl=self._to_server)
        try:
            await self._flows.wait()
            to_server.write(request)
            while chunk := await from_server.read(_CHUNK_BYTES):
                if asked.status is None:
                    asked.status = int(chunk.split(b" ", 2)[1])
                await self._flows.wait()
                if writer is not None:
                    writer.write(chunk)
                    await writer.drain()
        finally:
            await _abort(to_server)

    def _act(self, asked: Request) -> None:
        with self._lock:
            due = [each for each in self._interposed if each[0] == asked.verb]
        done = [each for each in due if each[1](asked.body)]
        with self._lock:
            self._interposed = [each for each in self._interposed if each not in done]

    def _note(self, asked: Request) -> Fault | None:
        """Keeps a request; the fault that it gets."""
        with self._lock:
            self._requests.append(asked)
            for fault in self._faults:
                if fault.verb == asked.verb and fault.times > 0 and fault.part in asked.target:
                    fault.times -= 1
                    return fault
        return None

    def _bounded(self, target: str) -> str:
        path, _, query = target.partition("?")
        found = parse_qs(query)
        if self._page_size is None or "limit" not in found:
            return target
        found["limit"] = [str(min(int(found["limit"][0]), self._page_size))]
        return f"{path}?{urlencode(found, doseq=True)}"

    def _caller(
        self, headers: Mapping[str, str], writer: asyncio.StreamWriter
    ) -> tuple[str, str | None]:
        """Its name, and the token to let it in by where it has none itself."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        with self._lock:
            if scheme == "Bearer":
                return self._names.get(token, "?"), None
            certificate = writer.get_extra_info("peercert") or {}
            names = dict(pair for part in certificate.get("subject", ()) for pair in part)
            name = names.get("commonName")
            tokens = [token for token, known in self._names.items() if known == name]
        return (str(name), tokens[-1]) if tokens else ("?", None)


async def _abort(writer: asyncio.StreamWriter) -> None:
    """Ends a connection, and waits until its socket is closed: nobody does after the loop's end."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _head_of(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + _HEAD_END


def _request_of(user: str, method: str, target: str, body: bytes) -> Request:
    """What is asked for, in Kubernetes' words."""
    url = urlsplit(target)
    _, in_namespace, below = url.path.partition("/namespaces/")
    _, *parts = below.split("/")
    if not in_namespace and url.path.startswith("/apis/"):
        # Of a kind that lies in no namespace: /apis/GROUP/VERSION/RESOURCE.
        parts = url.path.split("/")[4:]
    resource, name = (parts[0], "/".join(parts[1:])) if parts else (url.path, "?")
    verb = {"GET": "get" if name else "list"}.get(method, method.lower())
    if "watch=true" in url.query:
        verb = "watch"
    return Request(user, verb, resource, name, target, json.loads(body) if body else None)
