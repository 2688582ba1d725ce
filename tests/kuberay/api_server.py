"""The Kubernetes API over HTTPS on loopback: the paths, verbs and refusals that are used here.

Callers are known by bearer token or client certificate, and may do what they were granted. Every
request is kept, with who made it and what came of it. Faults are injected on command.
"""

import json
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .certificates import Authority
from .store import ConflictError, InvalidError, Json, NotFoundError, Store

NAMESPACE = "serving"
_API_GROUPS = {"rayclusters": "apis/ray.io/v1", "rayservices": "apis/ray.io/v1", "pods": "api/v1"}
_JSON_PATCH = "application/json-patch+json"
# What KubeRay grants to the head pod when the cluster's autoscaler is on. Source: KubeRay
# `common/rbac.go`, read 2026-11-20. A sidecar of the head pod has the same.
HEAD_POD_GRANTS = frozenset(
    {
        ("get", "rayclusters"),
        ("patch", "rayclusters"),
        ("get", "pods"),
        ("list", "pods"),
        ("watch", "pods"),
        ("patch", "pods"),
    }
)
# What has to be granted besides, for mirroring counts into a RayService.
MIRROR_GRANTS = frozenset({("get", "rayservices"), ("patch", "rayservices")})


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was answered. `body` is `None` for a request without one."""

    user: str
    verb: str
    resource: str
    name: str
    body: Any
    status: int
    at_s: float


@dataclass(slots=True)
class Fault:
    """An answer given instead of the right one, `times` times, to requests with this verb.

    `lands` says whether what was asked for is done all the same.
    """

    verb: str
    status: int
    times: int = 1
    retry_after_s: int | None = None
    lands: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and headers."""

    status: int
    body: Json
    headers: dict[str, str] = field(default_factory=dict)


class ApiServer:
    """Serves a store. A context manager; `url` is where, `ca_file` whom to trust."""

    def __init__(self, store: Store, folder: Path, page_size: int | None = None) -> None:
        self.store = store
        self.authority = Authority(folder)
        self.ca_file = self.authority.ca_file
        self._page_size = page_size
        self._grants: dict[str, frozenset[tuple[str, str]]] = {}
        self._tokens: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._requests: list[Request] = []
        self._lock = threading.Lock()
        self._server = _Server(self)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.server())
        context.load_verify_locations(self.ca_file)
        context.verify_mode = ssl.CERT_OPTIONAL
        # The handshake belongs into the connection's own thread.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "ApiServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.close_all()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def grant(self, user: str, grants: Iterable[tuple[str, str]], token: str | None = None) -> None:
        """Lets `user` (a certificate's name, or who has this token) do these and nothing else."""
        self._grants[user] = frozenset(grants)
        if token is not None:
            self._tokens[token] = user

    def inject(self, fault: Fault) -> None:
        """The next requests of its verb are answered so."""
        with self._lock:
            self._faults.append(fault)

    def requests(self, user: str | None = None, verb: str | None = None) -> list[Request]:
        """What was asked so far, in order."""
        with self._lock:
            found = list(self._requests)
        return [each for each in found if user in (None, each.user) and verb in (None, each.verb)]

    def answer(self, handler: BaseHTTPRequestHandler, method: str, body: bytes) -> Answer:
        """What a request gets; called by the connection's thread."""
        user = self._user(handler)
        url = urlsplit(handler.path)
        resource, name = _resource_of(url.path)
        verb = {"GET": "get" if name else "list", "PATCH": "patch"}.get(method, method.lower())
        document = json.loads(body) if body else None
        answer = self._answer(user, verb, resource, name, url.query, document, handler.headers)
        with self._lock:
            self._requests.append(
                Request(
                    user or "?", verb, resource, name, document, answer.status, time.monotonic()
                )
            )
        return answer

    def _answer(
        self,
        user: str | None,
        verb: str,
        resource: str,
        name: str,
        query: str,
        document: Any,
        headers: Mapping[str, str],
    ) -> Answer:
        if user is None:
            return _failure(401, "Unauthorized", "Unauthorized")
        if (verb, resource) not in self._grants.get(user, frozenset()):
            text = f'User "{user}" cannot {verb} resource "{resource}" in namespace "{NAMESPACE}"'
            return _failure(403, "Forbidden", f'{resource} "{name}" is forbidden: {text}')
        fault = self._next_fault(verb)
        if fault is not None and not fault.lands:
            return _faulty(fault)
        try:
            answer = self._obey(verb, resource, name, query, document, headers)
        except NotFoundError as error:
            answer = _failure(404, "NotFound", str(error.args[0]))
        except ConflictError as error:
            answer = _failure(409, "Conflict", str(error))
        except InvalidError as error:
            answer = _failure(422, "Invalid", str(error))
        return answer if fault is None else _faulty(fault)

    def _obey(
        self,
        verb: str,
        resource: str,
        name: str,
        query: str,
        document: Any,
        headers: Mapping[str, str],
    ) -> Answer:
        if verb == "get":
            return Answer(200, self.store.get(resource, name))
        if verb == "list":
            return Answer(200, self._page(resource, parse_qs(query)))
        if verb == "patch" and headers.get("Content-Type") == _JSON_PATCH:
            return Answer(200, self.store.patch(resource, name, document))
        return _failure(415, "UnsupportedMediaType", f"{verb} {headers.get('Content-Type')}")

    def _page(self, resource: str, query: Mapping[str, list[str]]) -> Json:
        selector = query.get("labelSelector", [""])[0]
        labels = dict(each.split("=", 1) for each in selector.split(",") if each)
        items = self.store.list(resource, labels)
        first = int(query.get("continue", ["0"])[0])
        limit = int(query.get("limit", ["0"])[0]) or len(items)
        last = first + min(limit, self._page_size or limit)
        metadata = {"resourceVersion": self.store.version}
        if last < len(items):
            metadata["continue"] = str(last)
        return {"kind": "List", "metadata": metadata, "items": items[first:last]}

    def _next_fault(self, verb: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.verb == verb and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def _user(self, handler: BaseHTTPRequestHandler) -> str | None:
        scheme, _, token = handler.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer":
            return self._tokens.get(token)
        certificate = handler.connection.getpeercert() or {}
        names = dict(pair for part in certificate.get("subject", ()) for pair in part)
        return names.get("commonName")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self._open: set[Any] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or did not trust us, is its own affair."""

    def close_all(self) -> None:
        """Connections that clients keep open would keep their threads."""
        for request in list(self._open):
            self.shutdown_request(request)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._serve("GET")

    def do_PATCH(self) -> None:
        self._serve("PATCH")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def log_message(self, *_: object) -> None:
        """Requests are kept by the server."""

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.api.answer(self, method, body)
        payload = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)


def _resource_of(path: str) -> tuple[str, str]:
    """Resource and name of a path; the name is empty for a list."""
    for resource, group in _API_GROUPS.items():
        prefix = f"/{group}/namespaces/{NAMESPACE}/{resource}"
        if path == prefix:
            return resource, ""
        if path.startswith(f"{prefix}/"):
            return resource, path.removeprefix(f"{prefix}/")
    return path, "?"


def _failure(status: int, reason: str, message: str) -> Answer:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    return Answer(status, body | {"reason": reason, "message": message})


def _faulty(fault: Fault) -> Answer:
    answer = _failure(fault.status, "Injected", "injected by the test")
    if fault.retry_after_s is not None:
        answer.headers["Retry-After"] = str(fault.retry_after_s)
    return answer
