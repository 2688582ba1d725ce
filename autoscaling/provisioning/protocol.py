"""Defines how slices are made and removed: the one seam between the plan and a cluster.

`kuberay` is the one that exists, for GKE; tests have another world behind the same protocol.
"""

from dataclasses import dataclass
from typing import Protocol

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.plan import ProvisioningPlan


@dataclass(frozen=True, slots=True)
class ClusterObservation:
    """The worker groups as they stand, and remarks on what could not be used, for the log."""

    groups: tuple[WorkerGroup, ...]
    notes: tuple[str, ...] = ()


class Provisioner(Protocol):
    """Shows the worker groups and changes them. Used from one event loop, one call at a time."""

    async def observe(self) -> ClusterObservation:
        """Reads the current state of all groups.

        Raises:
            ProvisioningError: they cannot be read. Nothing may be planned on an older state.
        """
        ...

    async def catch_up(self) -> None:
        """Brings the groups to what was applied, as far as that takes effect in place.

        What it cannot bring there is among the notes of the next observation.

        Raises:
            ProvisioningError: it could not be read or done. It is tried again when called again.
        """
        ...

    async def apply(self, plan: ProvisioningPlan) -> None:
        """Makes the plan's changes, each as a whole or not at all, in their order.

        Every change is tried, whatever became of those before it. A change that was planned on a
        picture which is no longer true is refused. Returns once the changes are accepted; slices
        come and go afterwards. Cancelling leaves at most one change of which it is not known
        whether it was made; the next observation shows it.

        Raises:
            ProvisioningError: the first failure, after all changes were tried.
        """
        ...
