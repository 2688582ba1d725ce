"""Counts the chips that a second cluster needs, and those that the quota allows. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.domain.names.gke_names import GKE_CHIPS

QUOTA_FIELD = f"requests.{GKE_CHIPS}"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChipNeed:
    """The chips of a second cluster beside the first.

    `num_used` are those of the cluster that runs, `num_started` those that the second one asks for
    when it is made. `num_allowed` is `None` where no quota bounds them.
    """

    num_used: int
    num_started: int
    num_allowed: int | None

    @property
    def num_more(self) -> int:
        """The chips that the second cluster needs to serve what the first one serves."""
        return max(self.num_used, self.num_started)

    @property
    def num_needed(self) -> int:
        """The chips of both while there are two."""
        return self.num_used + self.num_more

    @property
    def num_refused(self) -> int:
        """The chips that the quota would refuse."""
        return 0 if self.num_allowed is None else max(0, self.num_needed - self.num_allowed)

    def __str__(self) -> str:
        """Says the arithmetic in one line."""
        need = (
            f"a second cluster needs {self.num_more} chips beside the {self.num_used} that run, "
            f"{self.num_needed} in all"
        )
        if self.num_allowed is None:
            return f"{need}; no quota bounds them here, the reservation or Google's quota may"
        if not self.num_refused:
            return f"{need}; the quota allows {self.num_allowed}"
        return (
            f"{need}; the quota allows {self.num_allowed}: {self.num_refused} of them would be "
            "refused, and the first cluster would never go"
        )


def chip_need(wanted: Json, pods: Iterable[Json], num_allowed: int | None) -> ChipNeed:
    """Returns what a second cluster of spec `wanted` needs beside the one with these pods."""
    started = sum(
        max(int(group.get("replicas") or 0), int(group.get("minReplicas") or 0))
        * int(group.get("numOfHosts") or 1)
        * pod_chips(group["template"]["spec"])
        for group in wanted.get("workerGroupSpecs") or ()
    )
    return ChipNeed(sum(pod_chips(pod["spec"]) for pod in pods), started, num_allowed)


def allowed_chips(quotas: Iterable[Json]) -> int | None:
    """Returns the chips that all quotas of a namespace allow together: the least."""
    bounds = [
        int(hard[QUOTA_FIELD])
        for quota in quotas
        if QUOTA_FIELD in (hard := quota.get("spec", {}).get("hard") or {})
    ]
    return min(bounds, default=None)


def pod_chips(pod_spec: Json) -> int:
    """Returns the chips that a pod asks for."""
    return sum(
        int(((container.get("resources") or {}).get("limits") or {}).get(GKE_CHIPS, 0))
        for container in pod_spec.get("containers") or ()
    )
