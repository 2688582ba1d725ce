"""Finds the objects of one RayCluster: itself, the RayService that made it, and its worker pods.

Owns which objects are asked for. `WatchedCluster` keeps them current, for a loop that looks often.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import msgspec

from autoscaling.provisioning.errors import MissingError, RefusedError, UnusableError
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.objects.collection import STALE_AFTER_S, WATCH_S, Collection
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.raycluster import (
    Json,
    WorkerPod,
    decode_worker_pod,
    owning_service,
    worker_pods_selector,
)

RAY = "apis/ray.io/v1"
CORE = "api/v1"
CLUSTERS, SERVICES = "rayclusters", "rayservices"


@dataclass(frozen=True, slots=True)
class ClusterObjects:
    """The objects at one moment.

    `service` is the RayService that made the cluster; `None` if none did, or if it may not be read,
    of which `service_problem` has the reason.
    """

    cluster: Json
    pods: tuple[WorkerPod, ...]
    service: Json | None = None
    service_problem: str | None = None


class ClusterReader(Protocol):
    """Shows the objects of one RayCluster."""

    async def read(self) -> ClusterObjects:
        """Returns them as they are now.

        Raises:
            ProvisioningError: they cannot be read, or what is known of them is too old.
        """
        ...

    def accept(self, resource: str, text: bytes) -> None:
        """Takes over an object as the answer to a change of ours has it."""
        ...


class WatchedCluster:
    """Watches the objects from the first look on, as an asynchronous context manager.

    `on_change` is called after each change of what is read of them. For the others see
    `Collection`.
    """

    def __init__(
        self,
        api: KubernetesApi,
        raycluster: str,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        stale_after_s: float = STALE_AFTER_S,
        watch_s: int = WATCH_S,
    ) -> None:
        self._raycluster = raycluster

        def collection(selection: Selection, read: Callable[[msgspec.Raw], Any]) -> Collection[Any]:
            return Collection(
                api,
                selection,
                read,
                on_change=on_change,
                clock=clock,
                chance=chance,
                stale_after_s=stale_after_s,
                watch_s=watch_s,
            )

        self._collection = collection
        self._clusters = collection(Selection(RAY, CLUSTERS, name=raycluster), _cluster_of)
        self._pods = collection(worker_pods_of(raycluster), decode_worker_pod)
        self._services: Collection[Any] | None = None
        self._following: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "WatchedCluster":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)

    async def read(self) -> ClusterObjects:
        """See `ClusterReader`. The first call lists everything."""
        await self._follow(self._clusters)
        await self._follow(self._pods)
        clusters = self._clusters.current()
        if not clusters:
            raise MissingError(f"{CLUSTERS} {self._raycluster}: there is none")
        (cluster,), pods = clusters, self._pods.current()
        service = owning_service(cluster)
        if service is None:
            return ClusterObjects(cluster, pods)
        try:
            found = (await self._watched_service(service)).current()
        except RefusedError as error:
            return ClusterObjects(cluster, pods, None, str(error))
        if not found:
            return ClusterObjects(cluster, pods, None, f"{SERVICES} {service}: there is none")
        return ClusterObjects(cluster, pods, found[0])

    def accept(self, resource: str, text: bytes) -> None:
        """See `ClusterReader`."""
        collection = self._clusters if resource == CLUSTERS else self._services
        if collection is not None:
            collection.accept(text)

    async def _watched_service(self, name: str) -> Collection[Any]:
        if self._services is None or self._services.selection.name != name:
            await self._leave(SERVICES)
            self._services = self._collection(Selection(RAY, SERVICES, name=name), _service_of)
        await self._follow(self._services)
        return self._services

    async def _follow(self, collection: Collection[Any]) -> None:
        """Lists a collection, and follows it from then on. One that is followed costs nothing."""
        resource = collection.selection.resource
        if resource not in self._following:
            # Here, so that the first look waits for the list, or fails with it.
            await collection.refresh()
            self._following[resource] = asyncio.create_task(
                collection.follow(), name=f"watch {resource}"
            )
        elif self._following[resource].done():
            self._following.pop(resource).result()

    async def _leave(self, resource: str) -> None:
        task = self._following.pop(resource, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})


def worker_pods_of(raycluster: str) -> Selection:
    """Returns which pods are the workers of a RayCluster."""
    return Selection(CORE, "pods", labels=worker_pods_selector(raycluster))


def _cluster_of(text: msgspec.Raw) -> Json:
    """The cluster without its status, which changes with every pod."""
    found = _json(text)
    metadata = found.get("metadata") or {}
    names = ("name", "uid", "generation", "ownerReferences")
    kept = {key: metadata[key] for key in names if key in metadata}
    return {"metadata": kept, "spec": found.get("spec") or {}}


def _service_of(text: msgspec.Raw) -> Json:
    """What the service makes of its cluster, and the names of its clusters."""
    found = _json(text)
    try:
        spec, status = found["spec"], found.get("status") or {}
        clusters = {
            key: {"rayClusterName": (status.get(key) or {}).get("rayClusterName")}
            for key in ("activeServiceStatus", "pendingServiceStatus")
        }
        made = {"rayClusterConfig": spec["rayClusterConfig"]}
        if "upgradeStrategy" in spec:
            made["upgradeStrategy"] = spec["upgradeStrategy"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UnusableError(f"not a RayService as KubeRay 1.7 has it: {error!r}") from error
    return {"metadata": {"name": found["metadata"]["name"]}, "spec": made, "status": clusters}


def _json(text: msgspec.Raw) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UnusableError(f"an object that is no JSON object: {error}") from error
