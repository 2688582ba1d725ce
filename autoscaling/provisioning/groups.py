"""Defines what a provisioner observes: worker groups, and the slices in them. Holds no rules.

A worker group makes slices of one kind; `replicas` is the number requested of it. Its slices are
described by `serving.domain.supply.pods`.
"""

from dataclasses import dataclass, field

from serving.domain.supply.pods import ObservedSlice


@dataclass(frozen=True, slots=True, order=True)
class SliceKind:
    """The properties that make one slice as good as another: its compute class and its shape."""

    compute_class: str
    generation: str
    topology: str

    def __str__(self) -> str:
        """Returns the kind for a reader: `spot v6e 4x4`."""
        return f"{self.compute_class} {self.generation} {self.topology}"


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The current state of one group that makes slices.

    Pods that are being deleted are not in `slices`. `pods_pending_deletion` have been named for
    deletion and are still there. `zone` is `None` where the group's slices may be in several.
    """

    name: str
    kind: SliceKind
    replicas: int
    min_replicas: int
    max_replicas: int
    num_hosts: int
    slices: tuple[ObservedSlice, ...] = ()
    pods_pending_deletion: frozenset[str] = field(default_factory=frozenset)
    zone: str | None = None

    @property
    def asked_for(self) -> int:
        """The count that KubeRay goes by."""
        return max(self.min_replicas, min(self.replicas, self.max_replicas))

    @property
    def lasting(self) -> tuple[ObservedSlice, ...]:
        """The slices that stay unless they are named: KubeRay deletes one that lacks a pod."""
        return tuple(each for each in self.slices if len(each.pods) == self.num_hosts)
