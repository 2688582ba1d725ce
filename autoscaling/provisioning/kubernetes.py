"""Calls the few paths of the Kubernetes API that we use, over HTTPS.

Owns the request, the credentials, the form of pages and events, and the translation of failures.
Does not try again: the caller reads again instead, because an old change must not be repeated on a
new state. Objects in pages and events stay undecoded, so that each caller takes what it needs.

In a pod the API's address is in the environment, token and CA certificate are files below
`SERVICE_ACCOUNT`. The token is read anew for every request: Kubernetes replaces it about hourly.
"""

import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from autoscaling.provisioning.errors import (
    ExpiredError,
    MissingError,
    OutdatedError,
    ProvisioningError,
    RefusedError,
    ThrottledError,
    UnreachableError,
    UnusableError,
)
from autoscaling.provisioning.objects.wire import (
    ListPage,
    Selection,
    ServerStatus,
    WatchEvent,
    split_lines,
)

# Where Kubernetes puts a pod's credentials, and the variables that it sets.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE = "KUBERNETES_SERVICE_HOST"
PORT_VARIABLE = "KUBERNETES_SERVICE_PORT_HTTPS"

# An API server that is up answers these paths in milliseconds, a page of pods in tens of them.
TIMEOUT_S = 20.0
# A watch on which nothing comes for this long is lost: the server sends a bookmark every minute.
SILENCE_S = 90.0
# Objects in one page of a list. A pod of a slice is about 20 KB, and a page is held as a whole.
PAGE_SIZE = 100
# A connection whose other end is gone is noticed by the kernel within 30 s.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_ERROR_BY_STATUS: Mapping[int, type[ProvisioningError]] = {
    401: RefusedError,
    403: RefusedError,
    404: MissingError,
    409: OutdatedError,
    410: ExpiredError,
    # The API server's answer to a JSON patch whose `test` does not hold.
    422: OutdatedError,
    429: ThrottledError,
}


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """The address of the API and the credentials for it.

    `token_file` and `ca_file` are `None` where none is needed: behind a proxy that adds the
    credentials, and where the system's own certificates will do.
    """

    base_url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_pod(
        cls, environment: Mapping[str, str], namespace: str, folder: Path = SERVICE_ACCOUNT
    ) -> "KubernetesAccess":
        """The access that every pod has.

        Raises:
            KeyError: this is no pod.
        """
        host, port = environment[HOST_VARIABLE], environment.get(PORT_VARIABLE, "443")
        bracketed = f"[{host}]" if ":" in host else host  # IPv6
        return cls(f"https://{bracketed}:{port}", namespace, folder / "token", folder / "ca.crt")


class KubernetesApi:
    """Lists, watches and patches objects of one namespace, and lists and watches those of none.

    Close it with `aclose`.

    Every method raises a `ProvisioningError` that names what failed; none of them tries again.
    """

    def __init__(
        self,
        access: KubernetesAccess,
        timeout_s: float = TIMEOUT_S,
        silence_s: float = SILENCE_S,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._page_size = page_size
        verify: ssl.SSLContext | bool = True
        if access.ca_file is not None:
            verify = ssl.create_default_context(cafile=str(access.ca_file))
        self._client = httpx.AsyncClient(
            base_url=access.base_url,
            transport=httpx.AsyncHTTPTransport(verify=verify, socket_options=_SOCKET_OPTIONS),
            timeout=timeout_s,
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def pages(self, selection: Selection) -> AsyncGenerator[ListPage, None]:
        """Lists every object of the selection, page by page; all pages show one version.

        Raises:
            ExpiredError: the list took so long that the server dropped its version. Begin again.
        """
        path = self._path_of(selection)
        parameters = selection.parameters | {"limit": str(self._page_size)}
        while True:
            response = await self._ask("GET", path, params=parameters)
            try:
                page = msgspec.json.decode(response.content, type=ListPage)
            except msgspec.MsgspecError as error:
                raise UnusableError(f"GET {path}: an answer that is no list: {error}") from error
            yield page
            if not page.metadata.next_page:
                return
            parameters = parameters | {"continue": page.metadata.next_page}

    @asynccontextmanager
    async def watch(
        self, selection: Selection, version: str, timeout_s: int
    ) -> AsyncIterator[AsyncGenerator[WatchEvent, None]]:
        """Opens a stream of all changes after `version`; inside, the server has accepted it.

        The server ends it after `timeout_s`, and sooner if it wants to; that is no error. What is
        raised below may also be raised while events are read.

        Raises:
            ExpiredError: the server no longer knows what came after `version`. List anew.
        """
        path = self._path_of(selection)
        parameters = selection.parameters | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        timeout = httpx.Timeout(self._timeout_s, read=self._silence_s)
        try:
            async with self._client.stream(
                "GET", path, params=parameters, headers=self._headers(), timeout=timeout
            ) as response:
                if response.status_code >= 300:
                    await response.aread()
                    raise _error_of("WATCH", path, response)
                yield _events(path, response)
        except (OSError, httpx.HTTPError) as error:
            raise UnreachableError(f"WATCH {path}: {type(error).__name__}: {error}") from error

    async def json_patch(
        self, group: str, resource: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> bytes:
        """Applies a JSON patch, wholly or not at all; returns the object's JSON as it is then.

        Raises:
            OutdatedError: a `test` among the operations does not hold, or a path is not there.
        """
        path = self._path(group, resource, name)
        response = await self._ask(
            "PATCH",
            path,
            headers={"Content-Type": "application/json-patch+json"},
            content=json.dumps(list(operations)).encode(),
        )
        return response.content

    def _path_of(self, selection: Selection) -> str:
        if not selection.is_namespaced:
            return f"/{selection.group}/{selection.resource}"
        return self._path(selection.group, selection.resource)

    def _path(self, group: str, resource: str, name: str = "") -> str:
        path = f"/{group}/namespaces/{self._access.namespace}/{resource}"
        return f"{path}/{name}" if name else path

    async def _ask(self, verb: str, path: str, **request: Any) -> httpx.Response:
        try:
            headers = self._headers() | request.pop("headers", {})
            response = await self._client.request(verb, path, headers=headers, **request)
        except (OSError, httpx.HTTPError) as error:
            raise UnreachableError(f"{verb} {path}: {type(error).__name__}: {error}") from error
        if response.status_code >= 300:
            raise _error_of(verb, path, response)
        return response

    def _headers(self) -> dict[str, str]:
        # Compressed pages would cost both sides more than the network between them.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._access.token_file is not None:
            headers["Authorization"] = f"Bearer {self._access.token_file.read_text().strip()}"
        return headers


async def _events(path: str, response: httpx.Response) -> AsyncGenerator[WatchEvent, None]:
    async for line in split_lines(response.aiter_bytes()):
        try:
            event = msgspec.json.decode(line, type=WatchEvent)
            failure = (
                msgspec.json.decode(event.object, type=ServerStatus)
                if event.type == "ERROR"
                else None
            )
        except msgspec.MsgspecError as error:
            raise UnusableError(f"WATCH {path}: a line that is no event: {error}") from error
        if failure is not None:
            raise _error_kind(failure.code)(f"WATCH {path}: {failure.code}: {failure.message}")
        yield event


def _error_of(verb: str, path: str, response: httpx.Response) -> ProvisioningError:
    """Turns an answer in which the API server reports a failure into an error."""
    status = response.status_code
    try:
        message = msgspec.json.decode(response.content, type=ServerStatus).message
    except msgspec.MsgspecError:
        message = ""
    text = f"{verb} {path}: {status}: {message or response.reason_phrase}"
    return _error_kind(status)(text, _retry_after_s(response))


def _error_kind(status: int) -> type[ProvisioningError]:
    return _ERROR_BY_STATUS.get(status, UnreachableError if status >= 500 else UnusableError)


def _retry_after_s(response: httpx.Response) -> float | None:
    # Seconds, as the API server sends it; HTTP allows a date too, which only proxies send.
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
