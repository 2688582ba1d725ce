"""A client of the API server: what tests ask of it, in Kubernetes' words."""

import contextlib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx

_ESTABLISHED_WITHIN_S = 120.0
_POLL_S = 0.05
_NUM_READS = 3
# Where kinds are, besides those of the core.
_VERSIONS = {
    "ClusterRole": "rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
    "ComputeClass": "cloud.google.com/v1",
    "DaemonSet": "apps/v1",
    "Deployment": "apps/v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "MutatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "RayCluster": "ray.io/v1",
    "RayService": "ray.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "StatefulSet": "apps/v1",
}

Json = dict[str, Any]


class RefusedByServerError(AssertionError):
    """The API server does not do what it was asked; the message is its own, `code` HTTP's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Api:
    """One user's view. Fields that a schema does not know are refused in everything it sends.

    May be used by several threads. Every method raises RefusedByServerError where the server does
    not do it; `code` is 404 for what is not there.
    """

    def __init__(self, url: str, token: str, ca_file: Path) -> None:
        self._client = httpx.Client(
            base_url=url,
            verify=ssl.create_default_context(cafile=str(ca_file)),
            headers={"Authorization": f"Bearer {token}"},
            timeout=60.0,
            limits=httpx.Limits(max_connections=32),
        )
        self._plurals = cache(self._read_plurals)

    def close(self) -> None:
        """Ends its connections."""
        self._client.close()

    def is_ready(self) -> bool:
        """Whether the server takes requests."""
        try:
            return self._client.get("/readyz").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def get(self, kind: str, namespace: str | None, name: str) -> Json:
        """One object. `namespace` is `None` for what lies in none."""
        return self._answer(self._read(self._path(reference(kind, namespace, name), name)))

    def find(self, kind: str, namespace: str | None, name: str) -> Json | None:
        """One object; `None` if there is no such object."""
        try:
            return self.get(kind, namespace, name)
        except RefusedByServerError as error:
            if error.code == httpx.codes.NOT_FOUND:
                return None
            raise

    def list(
        self, kind: str, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> list[Json]:
        """The objects of a kind with these labels, by name, each with its kind."""
        body = reference(kind, namespace)
        selector = ",".join(f"{name}={value}" for name, value in (labels or {}).items())
        found = self._answer(self._read(self._path(body), params={"labelSelector": selector}))
        words = {"apiVersion": body["apiVersion"], "kind": kind}
        items = [words | each for each in found["items"]]
        return sorted(items, key=lambda each: str(each["metadata"]["name"]))

    def apply(self, body: Json) -> Json:
        """Applies an object as `kubectl apply --server-side` does; what the server made of it."""
        return self._answer(
            self._client.patch(
                self._path(body, body["metadata"]["name"]),
                json=body,
                headers={"Content-Type": "application/apply-patch+yaml"},
                params={"fieldManager": "tests", "force": "true", "fieldValidation": "Strict"},
            )
        )

    def create(self, body: Json, *, is_trial: bool = False) -> Json:
        """Creates an object; with `is_trial` it is only admitted, and nothing is kept."""
        params = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if is_trial else {})
        return self._answer(self._client.post(self._path(body), json=body, params=params))

    def exists(self, body: Json) -> bool:
        """Whether the server has an object of this kind and name."""
        path = self._path(body, body["metadata"]["name"])
        return self._read(path).status_code == httpx.codes.OK

    def replace(self, body: Json, part: str | None = None) -> Json:
        """Puts an object in the place of the one of its name, unless that has changed meanwhile.

        With `part` only that of it: `status`.
        """
        path = self._path(body, body["metadata"]["name"], *([part] if part else []))
        return self._answer(self._client.put(path, json=body))

    def patch(self, body: Json, operations: Sequence[Json], part: str | None = None) -> Json:
        """Applies a JSON patch to the object of this kind and name."""
        return self._patch(body, operations, "application/json-patch+json", part)

    def merge(self, body: Json, changes: Json, part: str | None = None) -> Json:
        """Merges `changes` into it; null takes a field away, and a list is taken whole."""
        return self._patch(body, changes, "application/merge-patch+json", part)

    def delete(self, body: Json, *, grace_s: int | None = 0) -> None:
        """Deletes an object that is there: at once, or with this grace; `None` is its own."""
        path = self._path(body, body["metadata"]["name"])
        params = {"propagationPolicy": "Background"}
        if grace_s is not None:
            params["gracePeriodSeconds"] = str(grace_s)
        self._answer(self._client.delete(path, params=params))

    def evict(self, pod: Json) -> None:
        """Asks for a pod's end as a drain of its node does; 429 where a budget forbids it."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        path = self._path(reference("Pod", namespace), name, "eviction")
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        self._answer(self._client.post(path, json=body))

    def bind(self, pod: Json, node_name: str) -> None:
        """Puts a pod on a node, as a scheduler does."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        path = self._path(reference("Pod", namespace), name, "binding")
        target = {"apiVersion": "v1", "kind": "Node", "name": node_name}
        body = reference("Pod", namespace, name) | {"kind": "Binding", "target": target}
        self._answer(self._client.post(path, json=body))

    def request_token(self, namespace: str, account: str) -> str:
        """A token of a service account, as a pod of it would have; good for an hour."""
        path = self._path(reference("ServiceAccount", namespace), account, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token: str = self._answer(self._client.post(path, json=body))["status"]["token"]
        return token

    def define(self, crd: Json) -> None:
        """Applies a CustomResourceDefinition, and waits until objects of it are taken."""
        self.apply(crd)
        name = crd["metadata"]["name"]
        wait(lambda: self._is_established(crd), f"{name} is established", _ESTABLISHED_WITHIN_S)
        # Its storage comes a moment after.
        wait(lambda: self._is_listed(crd), f"objects of {name} are listed", _ESTABLISHED_WITHIN_S)
        self._plurals = cache(self._read_plurals)

    def _patch(self, body: Json, content: Any, kind: str, part: str | None) -> Json:
        path = self._path(body, body["metadata"]["name"], *([part] if part else []))
        headers = {"Content-Type": kind}
        return self._answer(self._client.patch(path, json=content, headers=headers))

    def _is_established(self, crd: Json) -> bool:
        found = self._answer(self._read(self._path(crd, crd["metadata"]["name"])))
        # Null until the server has looked at it.
        conditions = found.get("status", {}).get("conditions") or ()
        return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)

    def _is_listed(self, crd: Json) -> bool:
        spec = crd["spec"]
        return all(
            self._read(
                f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}"
            ).is_success
            for version in spec["versions"]
            if version["served"]
        )

    def _path(self, body: Json, *name: str) -> str:
        version = body["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        plural, is_namespaced = self._plurals(root)[body["kind"]]
        # Of all namespaces, where none is named.
        namespace = body["metadata"].get("namespace") if is_namespaced else None
        where = ["namespaces", namespace] if namespace else []
        return "/".join([root, *where, plural, *name])

    def _read_plurals(self, root: str) -> dict[str, tuple[str, bool]]:
        """Each kind's name in paths, and whether it lies in namespaces."""
        resources = self._answer(self._read(root))["resources"]
        return {
            each["kind"]: (each["name"], each["namespaced"])
            for each in resources
            if "/" not in each["name"]
        }

    def _read(self, path: str, params: Mapping[str, str] | None = None) -> httpx.Response:
        """Gets it. Asked again, as by Kubernetes' own clients, where a busy server hangs up."""
        for _ in range(_NUM_READS - 1):
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                return self._client.get(path, params=params)
        return self._client.get(path, params=params)

    @staticmethod
    def _answer(answer: httpx.Response) -> Json:
        body: Json = answer.json()
        if answer.is_error:
            raise RefusedByServerError(answer.status_code, body.get("message", answer.text))
        return body


def reference(kind: str, namespace: str | None, name: str | None = None) -> Json:
    """As much of an object as says which it is."""
    metadata = {"namespace": namespace, "name": name}
    return {
        "apiVersion": _VERSIONS.get(kind, "v1"),
        "kind": kind,
        "metadata": {key: value for key, value in metadata.items() if value is not None},
    }


def wait(is_so: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Waits until `is_so`; fails with `what` after `timeout_s`. Not for use on an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(_POLL_S)
