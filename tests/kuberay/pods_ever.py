"""Every pod that was ever there in a namespace, as a watch of the API server shows them."""

import asyncio
import json
import ssl
from types import TracebackType
from typing import Any

import httpx
from control_plane.server import ControlPlane

from autoscaling.provisioning.raycluster import GROUP_LABEL

from .objects import replica_of

Json = dict[str, Any]


class PodsEver:
    """An administrator's watch. An asynchronous context manager, entered before pods come."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        token = (plane.folder / "tokens.csv").read_text().split(",")[0]
        self._client = httpx.AsyncClient(
            base_url=plane.url,
            verify=ssl.create_default_context(cafile=str(plane.ca_file)),
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(10.0, read=None),
        )
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._groups: dict[str, str] = {}  # by incarnation
        self._has_begun = asyncio.Event()

    async def __aenter__(self) -> "PodsEver":
        self._watching = asyncio.create_task(self._watch(), name="pods-ever")
        await self._has_begun.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.aclose()

    def incarnations(self, group: str) -> set[str]:
        """The slices of a group that were ever there, none of them twice."""
        assert not self._watching.done(), f"the watch has ended: {self._watching!r}"
        return {name for name, of in self._groups.items() if of == group}

    async def _watch(self) -> None:
        # It begins with what is there.
        query = {"watch": "true", "timeoutSeconds": "3600"}
        async with self._client.stream("GET", self._path, params=query) as answer:
            answer.raise_for_status()
            self._has_begun.set()
            async for line in answer.aiter_lines():
                event = json.loads(line)
                assert event["type"] != "ERROR", event
                pod = event["object"]
                if GROUP_LABEL in pod["metadata"].get("labels", {}):
                    self._groups[replica_of(pod)] = pod["metadata"]["labels"][GROUP_LABEL]
