"""Provides slices that simply exist: one TPU VM, a node pool of fixed size, a cluster made by hand.

Nothing can be added or dropped: each group's bounds are the slices that it has.
"""

from collections.abc import Mapping, Sequence

from autoscaling.provisioning.errors import OutdatedError
from autoscaling.provisioning.groups import SliceKind, WorkerGroup
from autoscaling.provisioning.plan import ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation
from serving.domain.supply.pods import ObservedPod, ObservedSlice, PodPhase


class StaticProvisioner:
    """The slices named at the start, by kind, and no others."""

    def __init__(self, slices: Mapping[SliceKind, Sequence[str]]) -> None:
        self._groups = tuple(_group(kind, slices[kind]) for kind in sorted(slices))

    async def observe(self) -> ClusterObservation:
        """Returns the same groups every time."""
        return ClusterObservation(self._groups)

    async def catch_up(self) -> None:
        """Does nothing: nothing is applied to slices that simply exist."""

    async def apply(self, plan: ProvisioningPlan) -> None:
        """Accepts a plan that changes nothing.

        Raises:
            OutdatedError: the plan changes something, so it was made for other groups.
        """
        for change in plan.changes:
            if change.is_scaling:
                name = change.group.name
                raise OutdatedError(f"{name} has slices that nobody can add to or take from")


def _group(kind: SliceKind, names: Sequence[str]) -> WorkerGroup:
    slices = tuple(
        ObservedSlice(name, (ObservedPod(name, PodPhase.RUNNING),)) for name in sorted(names)
    )
    count = len(slices)
    return WorkerGroup(str(kind), kind, count, count, count, num_hosts=1, slices=slices)
