"""Calls the few paths of the Kubernetes API that we use, over HTTPS.

Owns the request, the credentials and the translation of failures. Does not try again: the caller's
loop reads again instead, because an old change must not be repeated on a new state.

In a pod the API's address is in the environment, token and CA certificate are files below
`SERVICE_ACCOUNT`. The token is read anew for every request: Kubernetes replaces it about hourly.
"""

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from autoscaling.provisioning.errors import (
    MissingError,
    OutdatedError,
    ProvisioningError,
    RefusedError,
    ThrottledError,
    UnreachableError,
    UnusableError,
)

# Where Kubernetes puts a pod's credentials, and the variables that it sets.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE = "KUBERNETES_SERVICE_HOST"
PORT_VARIABLE = "KUBERNETES_SERVICE_PORT_HTTPS"

# An API server that is up answers these paths in milliseconds, lists of many pods in a second.
TIMEOUT_S = 20.0
# Objects in one page of a list: kubectl's own number.
_PAGE_SIZE = 500
_ERROR_BY_STATUS: Mapping[int, type[ProvisioningError]] = {
    401: RefusedError,
    403: RefusedError,
    404: MissingError,
    409: OutdatedError,
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
    """Gets, lists and patches objects of one namespace. Close it with `aclose`.

    Every method raises a `ProvisioningError` that names what failed; none of them tries again.
    """

    def __init__(self, access: KubernetesAccess, timeout_s: float = TIMEOUT_S) -> None:
        self._access = access
        verify: ssl.SSLContext | bool = True
        if access.ca_file is not None:
            verify = ssl.create_default_context(cafile=str(access.ca_file))
        self._client = httpx.AsyncClient(
            base_url=access.base_url, verify=verify, timeout=timeout_s, trust_env=False
        )

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def get(self, group: str, resource: str, name: str) -> dict[str, Any]:
        """Reads one object, such as `rayclusters` (resource) of `apis/ray.io/v1` (group)."""
        return await self._ask("GET", self._path(group, resource, name))

    async def list(self, group: str, resource: str, labels: str) -> list[dict[str, Any]]:
        """Lists every object with these labels (a Kubernetes label selector), through all pages."""
        items: list[dict[str, Any]] = []
        page = {"labelSelector": labels, "limit": str(_PAGE_SIZE)}
        while True:
            answer = await self._ask("GET", self._path(group, resource), params=page)
            found = answer.get("items")
            if not isinstance(found, list):
                raise UnusableError(f"a list of {resource} without items")
            items += found
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return items
            page = {**page, "continue": token}

    async def json_patch(
        self, group: str, resource: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Applies a JSON patch, wholly or not at all; returns the object as it is then.

        Raises:
            OutdatedError: a `test` among the operations does not hold, or a path is not there.
        """
        return await self._ask(
            "PATCH",
            self._path(group, resource, name),
            headers={"Content-Type": "application/json-patch+json"},
            content=json.dumps(list(operations)).encode(),
        )

    def _path(self, group: str, resource: str, name: str = "") -> str:
        path = f"/{group}/namespaces/{self._access.namespace}/{resource}"
        return f"{path}/{name}" if name else path

    async def _ask(self, verb: str, path: str, **request: Any) -> dict[str, Any]:
        headers = {"Accept": "application/json", **request.pop("headers", {})}
        try:
            headers |= self._authorization()
            response = await self._client.request(verb, path, headers=headers, **request)
        except (OSError, httpx.HTTPError) as error:
            raise UnreachableError(f"{verb} {path}: {type(error).__name__}: {error}") from error
        if response.status_code >= 300:
            raise _error_of(verb, path, response)
        answer = _json_object(response)
        if answer is None:
            raise UnusableError(f"{verb} {path}: an answer that is no JSON object")
        return answer

    def _authorization(self) -> dict[str, str]:
        if self._access.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self._access.token_file.read_text().strip()}"}


def _error_of(verb: str, path: str, response: httpx.Response) -> ProvisioningError:
    """Turns an answer in which the API server reports a failure into an error."""
    status = response.status_code
    message = (_json_object(response) or {}).get("message") or response.reason_phrase
    kind = _ERROR_BY_STATUS.get(status, UnreachableError if status >= 500 else UnusableError)
    return kind(f"{verb} {path}: {status}: {message}", _retry_after_s(response))


def _json_object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        answer = response.json()
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _retry_after_s(response: httpx.Response) -> float | None:
    # Seconds, as the API server sends it; HTTP allows a date too, which only proxies send.
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
