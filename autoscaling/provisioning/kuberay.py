"""Provisions slices as replicas of a RayCluster's worker groups, which KubeRay and GKE make.

Owns the order of requests. Objects and patches are `raycluster`'s, the wire is `kubernetes`'. Needs
`get` and `patch` on rayclusters and `list` on pods, which KubeRay grants to the head pod of a
cluster whose autoscaler is on; and `get` and `patch` on rayservices, if a RayService owns it.
"""

from collections.abc import Sequence

from autoscaling.provisioning.errors import MissingError, ProvisioningError, RefusedError
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.plan import Change, ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation
from autoscaling.provisioning.raycluster import (
    Json,
    mirror_patch,
    mirrored_groups,
    owning_service,
    positions,
    read_groups,
    scaling_patch,
    worker_pods_selector,
)

_RAY = "apis/ray.io/v1"
_CORE = "api/v1"


class KubeRayProvisioner:
    """The worker groups of one RayCluster. Keeps only what `apply` needs of the last reading."""

    def __init__(self, api: KubernetesApi, raycluster: str) -> None:
        self._api = api
        self._raycluster = raycluster
        self._positions: dict[str, int] = {}
        self._service: str | None = None
        self._mirrored: Sequence[Json] = ()

    async def observe(self) -> ClusterObservation:
        """Reads cluster and pods; see `Provisioner`. An unreadable RayService is only a note."""
        cluster = await self._api.get(_RAY, "rayclusters", self._raycluster)
        pods = await self._api.list(_CORE, "pods", worker_pods_selector(self._raycluster))
        self._service, self._mirrored = owning_service(cluster), ()
        service_notes = []
        if self._service is not None:
            try:
                service = await self._api.get(_RAY, "rayservices", self._service)
                self._mirrored = mirrored_groups(service, self._raycluster)
            except (RefusedError, MissingError) as error:
                service_notes.append(f"counts are not mirrored into the RayService: {error}")
        groups, notes = read_groups(cluster, pods, self._mirrored)
        self._positions = positions(cluster["spec"].get("workerGroupSpecs") or ())
        return ClusterObservation(tuple(groups), (*notes, *service_notes))

    async def apply(self, plan: ProvisioningPlan) -> None:
        """Applies the plan; see `Provisioner`. Changes the cluster first: KubeRay obeys it."""
        failures = []
        for change in plan.changes:
            try:
                await self._apply(change)
            except ProvisioningError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _apply(self, change: Change) -> None:
        if change.is_scaling:
            patch = scaling_patch(change, self._positions[change.group.name])
            await self._api.json_patch(_RAY, "rayclusters", self._raycluster, patch)
        if self._service is not None and change.group.mirrored_replicas not in (
            None,
            change.replicas,
        ):
            patch = mirror_patch(change, self._mirrored)
            await self._api.json_patch(_RAY, "rayservices", self._service, patch)
