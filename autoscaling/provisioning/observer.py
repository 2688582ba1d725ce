"""Defines what the provisioner's loop tells whoever looks on. Decides nothing, holds nothing."""

from typing import Protocol

from autoscaling.provisioning.plan import Change, ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation
from serving.domain.supply.records import SupplyReport


class RoundObserver(Protocol):
    """Is told what the loop sees and does, as it happens. Must neither block nor raise."""

    def observed(self, observation: ClusterObservation) -> None:
        """Takes in what there is; also between two rounds."""
        ...

    def reported(self, report: SupplyReport) -> None:
        """Takes in what the directory says; after `observed`."""
        ...

    def changed(self, change: Change) -> None:
        """Takes in a change that was made."""
        ...

    def done(self, plan: ProvisioningPlan) -> None:
        """Takes in the plan of a round that went well; a round ends with this or `failed`."""
        ...

    def failed(self, error: Exception) -> None:
        """Takes in why a round failed."""
        ...


class Unobserved:
    """Nobody looks."""

    def observed(self, observation: ClusterObservation) -> None:
        """See `RoundObserver`."""

    def reported(self, report: SupplyReport) -> None:
        """See `RoundObserver`."""

    def changed(self, change: Change) -> None:
        """See `RoundObserver`."""

    def done(self, plan: ProvisioningPlan) -> None:
        """See `RoundObserver`."""

    def failed(self, error: Exception) -> None:
        """See `RoundObserver`."""
