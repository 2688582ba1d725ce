"""The pods of slices, as the provisioner sees them in Kubernetes and reports them to the directory.

A slice is one KubeRay replica: as many pods as it has hosts. Slice names are no identity, since a
replacement gets the name of the slice it replaces; pod names are. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError


class PodPhase(StrEnum):
    """The phases of a pod, as Kubernetes names them."""

    PENDING = "Pending"  # no node for it yet, or its image is being fetched
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"  # its Ray node ended by itself
    FAILED = "Failed"  # its Ray node or its host died
    UNKNOWN = "Unknown"  # its host does not answer


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """The pod of one host, running or still to come.

    `address` is `None` until it has one. `machine` is the Kubernetes node that it was given, from
    when on it is paid for; `None` until then. `waiting` is what keeps one of its containers from
    starting, as the kubelet words it (`ImagePullBackOff: ...`); `None` if nothing does, also while
    its image is fetched and its volumes are mounted.
    """

    name: str
    phase: PodPhase
    address: str | None = None
    machine: str | None = None
    waiting: str | None = None


@dataclass(frozen=True, slots=True)
class ObservedSlice:
    """The slice that exists or is being provisioned; `pods` are in host order and never empty.

    `is_outdated` says that a pod of it was made from an older template than its group has now.
    `leave_reason` is why whoever has it is asked to leave it; `None`: nobody is asked.
    """

    name: str
    pods: tuple[ObservedPod, ...]
    is_outdated: bool = False
    leave_reason: str | None = None

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
class GroupPods:
    """The slices of one worker group. `zone` is `None` where the group names none."""

    group: str
    compute_class: str
    generation: str
    topology: str
    zone: str | None
    num_hosts: int
    slices: tuple[ObservedSlice, ...]


class PodsReportError(ValueError):
    """The report is not in this version's form, because another version wrote it."""


_REPORT = TypeAdapter(tuple[GroupPods, ...])


def encode_pods(groups: tuple[GroupPods, ...]) -> bytes:
    """Returns the report as it is stored."""
    return _REPORT.dump_json(groups)


def decode_pods(text: bytes) -> tuple[GroupPods, ...]:
    """Returns the stored report.

    Raises:
        PodsReportError: another version wrote it.
    """
    try:
        return _REPORT.validate_json(text)
    except ValidationError as error:
        raise PodsReportError(f"the report of pods: {error}") from error
