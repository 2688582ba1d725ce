"""Reads a RayCluster anew at each look: what a provisioner that watches is compared with."""

from typing import Any

import msgspec

from autoscaling.provisioning.errors import MissingError, RefusedError
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.objects.cluster import (
    CLUSTERS,
    RAY,
    SERVICES,
    ClusterObjects,
    worker_pods_of,
)
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.raycluster import decode_worker_pod, owning_service

Json = dict[str, Any]


class ListedCluster:
    """A `ClusterReader` that keeps nothing."""

    def __init__(self, api: KubernetesApi, raycluster: str) -> None:
        self._api = api
        self._raycluster = raycluster

    async def read(self) -> ClusterObjects:
        """See `ClusterReader`."""
        cluster = await read_one(self._api, CLUSTERS, self._raycluster)
        pages = self._api.pages(worker_pods_of(self._raycluster))
        pods = tuple([decode_worker_pod(item) async for page in pages for item in page.items])
        service = owning_service(cluster)
        if service is None:
            return ClusterObjects(cluster, pods)
        try:
            found = await read_one(self._api, SERVICES, service)
        except (RefusedError, MissingError) as error:
            return ClusterObjects(cluster, pods, None, str(error))
        return ClusterObjects(cluster, pods, found)

    def accept(self, resource: str, text: bytes) -> None:
        """Does nothing: the next look reads everything."""


def listing(api: KubernetesApi, raycluster: str) -> KubeRayProvisioner:
    """A provisioner whose each look is a list."""
    return KubeRayProvisioner(api, raycluster, ListedCluster(api, raycluster))


async def read_one(api: KubernetesApi, resource: str, name: str) -> Json:
    """The object of KubeRay's of this name.

    Raises:
        ProvisioningError: it is not there, or cannot be read.
    """
    pages = [page async for page in api.pages(Selection(RAY, resource, name=name))]
    items = [item for page in pages for item in page.items]
    if not items:
        raise MissingError(f"{resource} {name}: there is none")
    found: Json = msgspec.json.decode(items[0])
    return found
