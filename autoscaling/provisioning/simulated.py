"""Slices of a cluster in this process: what `make sim` and tests run on.

Plays the operator too: a slice that the cluster loses is asked for again by the next plan, because
the count is always that of the slices which exist or are to come.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autoscaling.provisioning.demand import SliceKind
from autoscaling.provisioning.errors import OutdatedError
from autoscaling.provisioning.groups import ObservedPod, ObservedSlice, PodPhase, WorkerGroup
from autoscaling.provisioning.plan import Change, ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation


class SliceCluster(Protocol):
    """A cluster that slices can be asked of. Its methods may block; they are called in threads."""

    def slices(self, group: str) -> Mapping[str, bool]:
        """The group's slices by name, those to come included; whether each is there already."""
        ...

    def add_slice(self, group: str) -> None:
        """Asks for one more slice; it may come later, or never."""
        ...

    def remove_slice(self, name: str) -> None:
        """Takes a slice away, or no longer asks for it; one that is gone already is no error."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A kind of slice that the cluster makes, and how many of them it would."""

    name: str
    kind: SliceKind
    max_replicas: int
    min_replicas: int = 0


class SimulatedProvisioner:
    """Adds to and takes from `cluster`, one slice at a time."""

    def __init__(self, cluster: SliceCluster, groups: Sequence[SimulatedGroup]) -> None:
        self._cluster = cluster
        self._groups = tuple(groups)

    async def observe(self) -> ClusterObservation:
        """The groups with the slices that they have, or have asked for."""
        return ClusterObservation(tuple([await self._observe(group) for group in self._groups]))

    async def apply(self, plan: ProvisioningPlan) -> None:
        """Adds and removes slices; returns when the cluster has been told of all of them.

        Raises:
            OutdatedError: a group no longer is as planned; the others have been changed.
        """
        outdated = [change for change in plan.changes if not await self._apply(change)]
        if outdated:
            names = ", ".join(change.group.name for change in outdated)
            raise OutdatedError(f"changed since they were looked at: {names}")

    async def _apply(self, change: Change) -> bool:
        name = change.group.name
        present = await asyncio.to_thread(self._cluster.slices, name)
        if len(present) != change.group.replicas:
            return False
        for drop in change.drops:
            await asyncio.to_thread(self._cluster.remove_slice, drop.slice.name)
        for _ in range(change.replicas + len(change.drops) - len(present)):
            await asyncio.to_thread(self._cluster.add_slice, name)
        return True

    async def _observe(self, group: SimulatedGroup) -> WorkerGroup:
        present = await asyncio.to_thread(self._cluster.slices, group.name)
        slices = tuple(
            ObservedSlice(name, (ObservedPod(name, _phase(is_there=present[name])),))
            for name in sorted(present)
        )
        return WorkerGroup(
            group.name,
            group.kind,
            replicas=len(slices),
            min_replicas=group.min_replicas,
            max_replicas=group.max_replicas,
            num_hosts=1,
            slices=slices,
        )


def _phase(*, is_there: bool) -> PodPhase:
    return PodPhase.RUNNING if is_there else PodPhase.PENDING
