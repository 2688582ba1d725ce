"""A client of the API server: what tests ask of it, in Kubernetes' words."""

import ssl
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx

_ESTABLISHED_WITHIN_S = 120.0

Json = dict[str, Any]


class RefusedByServerError(AssertionError):
    """The API server does not take an object; the message is its own."""


class Api:
    """One user's view. Fields that a schema does not know are refused in everything it sends."""

    def __init__(self, url: str, token: str, ca_file: Path) -> None:
        self._client = httpx.Client(
            base_url=url,
            verify=ssl.create_default_context(cafile=str(ca_file)),
            headers={"Authorization": f"Bearer {token}"},
            timeout=60.0,
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

    def apply(self, body: Json) -> Json:
        """Applies an object as `kubectl apply --server-side` does; what the server made of it.

        Raises:
            RefusedByServerError: it does not take it.
        """
        return self._answer(
            self._client.patch(
                self._path(body, body["metadata"]["name"]),
                json=body,
                headers={"Content-Type": "application/apply-patch+yaml"},
                params={"fieldManager": "tests", "force": "true", "fieldValidation": "Strict"},
            )
        )

    def create(self, body: Json) -> Json:
        """Creates an object.

        Raises:
            RefusedByServerError: the server does not take it.
        """
        params = {"fieldValidation": "Strict"}
        return self._answer(self._client.post(self._path(body), json=body, params=params))

    def delete(self, body: Json) -> None:
        """Deletes an object that is there, at once."""
        path = self._path(body, body["metadata"]["name"])
        params = {"gracePeriodSeconds": "0", "propagationPolicy": "Background"}
        self._answer(self._client.delete(path, params=params))

    def define(self, crd: Json) -> None:
        """Applies a CustomResourceDefinition, and waits until objects of it are taken."""
        self.apply(crd)
        deadline_s = time.monotonic() + _ESTABLISHED_WITHIN_S
        while not self._is_established(crd):
            name = crd["metadata"]["name"]
            assert time.monotonic() < deadline_s, f"{name} is not established"
            time.sleep(0.1)
        self._plurals = cache(self._read_plurals)

    def _is_established(self, crd: Json) -> bool:
        found = self._answer(self._client.get(self._path(crd, crd["metadata"]["name"])))
        # Null until the server has looked at it.
        conditions = found.get("status", {}).get("conditions") or ()
        return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)

    def _path(self, body: Json, *name: str) -> str:
        version = body["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        plural, is_namespaced = self._plurals(root)[body["kind"]]
        metadata = body["metadata"]
        where = ["namespaces", metadata["namespace"]] if is_namespaced else []
        return "/".join([root, *where, plural, *name])

    def _read_plurals(self, root: str) -> dict[str, tuple[str, bool]]:
        """Each kind's name in paths, and whether it lies in namespaces."""
        resources = self._answer(self._client.get(root))["resources"]
        return {
            each["kind"]: (each["name"], each["namespaced"])
            for each in resources
            if "/" not in each["name"]
        }

    @staticmethod
    def _answer(answer: httpx.Response) -> Json:
        body: Json = answer.json()
        if answer.is_error:
            raise RefusedByServerError(body.get("message", answer.text))
        return body
