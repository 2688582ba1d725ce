"""Defines what a provisioner observes: worker groups, and the slices in them. Holds no rules.

A worker group makes slices of one kind; `replicas` is the number requested of it. A slice is one
KubeRay replica: as many pods as it has hosts. Slice names are no identity, since a replacement gets
the name of the slice it replaces; pod names are.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from autoscaling.provisioning.demand import SliceKind


class PodPhase(StrEnum):
    """The phases of a pod, as Kubernetes names them."""

    PENDING = "Pending"  # no node for it yet, or its image is being fetched
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"  # its Ray node ended by itself
    FAILED = "Failed"  # its Ray node or its host died
    UNKNOWN = "Unknown"  # its host does not answer


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """The pod of one host, running or still to come. `address` is `None` until it has one."""

    name: str
    phase: PodPhase
    address: str | None = None


@dataclass(frozen=True, slots=True)
class ObservedSlice:
    """The slice that exists or is being provisioned; `pods` are in host order and never empty."""

    name: str
    pods: tuple[ObservedPod, ...]

    @property
    def incarnation(self) -> str:
        """The name of its first pod, which is never reused, unlike the name of the slice."""
        return self.pods[0].name

    @property
    def is_running(self) -> bool:
        """Returns whether every host is running."""
        return all(pod.phase == PodPhase.RUNNING for pod in self.pods)

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses of the hosts that have one."""
        return frozenset(pod.address for pod in self.pods if pod.address is not None)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The current state of one group that makes slices.

    Pods that are being deleted are not in `slices`. `pods_pending_deletion` have been named for
    deletion and are still there. `mirrored_replicas` is the count in the object this group was
    copied from (the RayService); `None` if there is none, or it is not to be touched now.
    """

    name: str
    kind: SliceKind
    replicas: int
    min_replicas: int
    max_replicas: int
    num_hosts: int
    slices: tuple[ObservedSlice, ...] = ()
    pods_pending_deletion: frozenset[str] = field(default_factory=frozenset)
    mirrored_replicas: int | None = None

    @property
    def asked_for(self) -> int:
        """The count that KubeRay goes by."""
        return max(self.min_replicas, min(self.replicas, self.max_replicas))

    @property
    def lasting(self) -> tuple[ObservedSlice, ...]:
        """The slices that stay unless they are named: KubeRay deletes one that lacks a pod."""
        return tuple(each for each in self.slices if len(each.pods) == self.num_hosts)
