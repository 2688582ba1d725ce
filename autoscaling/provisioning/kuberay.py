"""Provisions slices as replicas of a RayCluster's worker groups, which KubeRay and GKE make.

Owns the order of requests. What is read is `objects.cluster`'s, what it means `raycluster`'s, the
changes `patches`', the wire `kubernetes`'. Needs `list`, `watch` and `patch` on rayclusters, and
`list` and `watch` on pods and on the RayService that owns the cluster.
"""

import logging
from collections.abc import Sequence

from autoscaling.provisioning.carry.compare import carry_over
from autoscaling.provisioning.errors import ProvisioningError
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.objects.cluster import (
    CLUSTERS,
    RAY,
    ClusterObjects,
    ClusterReader,
)
from autoscaling.provisioning.objects.patches import positions, scaling_patch
from autoscaling.provisioning.plan import Change, ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation
from autoscaling.provisioning.raycluster import (
    GROUP_LABEL,
    Json,
    read_groups,
)

logger = logging.getLogger(__name__)


class KubeRayProvisioner:
    """The worker groups of one RayCluster. Keeps only what `apply` needs of the last reading.

    `reader` is where the objects are read, `api` where they are changed.
    """

    def __init__(self, api: KubernetesApi, raycluster: str, reader: ClusterReader) -> None:
        self._api = api
        self._raycluster = raycluster
        self._reader = reader
        self._objects: ClusterObjects | None = None
        self._observation = ClusterObservation(())
        # What was compared last, and what could not be carried over then.
        self._compared: ClusterObjects | None = None
        self._hindrances: tuple[str, ...] = ()

    async def observe(self) -> ClusterObservation:
        """Reads cluster and pods; see `Provisioner`. An unreadable RayService is only a note."""
        objects = await self._reader.read()
        # Where nothing has changed, thousands of pods need not be gathered again.
        if objects != self._objects:
            groups, notes = read_groups(objects.cluster, objects.pods)
            if objects.service_problem is not None:
                problem = objects.service_problem
                notes.append(f"what is applied to the RayService is not carried over: {problem}")
            self._objects = objects
            self._observation = ClusterObservation(tuple(groups), tuple(notes))
        if self._hindrances:
            noted = (*self._observation.notes, *self._hindrances)
            return ClusterObservation(self._observation.groups, noted)
        return self._observation

    async def catch_up(self) -> None:
        """Carries into the cluster what its RayService has; see `Provisioner`."""
        objects = await self._reader.read()
        if objects.service is None or objects == self._compared:
            return
        # Only which groups have pods matters here.
        groups = {pod.group for pod in objects.pods}
        pods = [{"metadata": {"labels": {GROUP_LABEL: group}}} for group in groups]
        carried = carry_over(objects.service, objects.cluster, pods)
        self._hindrances = tuple(
            f"{each.subject}: {each.what} is not carried over: {each.reason}; "
            f"what works: {each.way}"
            for each in carried.hindrances
        )
        if carried.patch:
            for change in carried.changes:
                logger.info("carried_over subject=%s what=%r", change.subject, change.what)
            await self._patch(CLUSTERS, self._raycluster, carried.patch)
        self._compared = objects

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
        assert self._objects is not None
        cluster = self._objects.cluster
        if change.is_scaling:
            position = positions(cluster["spec"]["workerGroupSpecs"])[change.group.name]
            patch = scaling_patch(change, position, cluster["metadata"].get("uid"))
            await self._patch(CLUSTERS, self._raycluster, patch)

    async def _patch(self, resource: str, name: str, patch: Sequence[Json]) -> None:
        self._reader.accept(resource, await self._api.json_patch(RAY, resource, name, patch))
