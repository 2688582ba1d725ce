"""The samples of collectors: undecoded answers of a source, and the outcome of the collection.

Owns the shapes of raw answers, which a capture file also holds, and the codes of failure. Does not
own how an answer is got (`libtpu_service`, `host_sources`) nor what it means
(`libtpu_service.decode`, `host_decode`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field


class Code(StrEnum):
    """The outcome of a collection, and the label `code` of the error counter."""

    OK = "OK"
    # The whole collector. Those that gRPC has are spelled as gRPC does; others of gRPC's pass
    # through as text.
    UNAVAILABLE = "UNAVAILABLE"  # nobody answers there: no workload, or no such service
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # it hangs
    UNIMPLEMENTED = "UNIMPLEMENTED"  # a libtpu from before the service
    CRASHED = "CRASHED"  # the collector itself, or its child process
    # What it answered with.
    EMPTY = "EMPTY"  # it answered without one value of a device
    PARTIAL = "PARTIAL"  # some of it failed or was dropped, the rest is served
    UNREADABLE = "UNREADABLE"  # an answer that is no such message, page or file
    # One sample was dropped for it.
    BAD_ATTRIBUTE = "BAD_ATTRIBUTE"  # no device, or not in the form that its family has
    BAD_VALUE = "BAD_VALUE"  # no number, negative, or a share above 105 %
    BAD_DISTRIBUTION = "BAD_DISTRIBUTION"  # a histogram that contradicts itself
    CONFLICT = "CONFLICT"  # two values for one series
    LABEL_LIMIT = "LABEL_LIMIT"  # more label sets than the registry allows
    CHIP_COUNT = "CHIP_COUNT"  # more devices than the host has: nobody knows which is which


class Raw(BaseModel):
    """The base of raw answers and of our files with them: strict and frozen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


class LibtpuAnswers(Raw):
    """The answers of one runtime process, by metric; each metric is in one mapping.

    `answers` are encoded messages, kept whole because tomorrow's libtpu may put more in them than
    we read today. `failures` are gRPC's status codes. `supported` is every name that was offered.
    """

    kind: Literal["libtpu"] = "libtpu"
    supported: tuple[str, ...]
    answers: Mapping[str, bytes]
    failures: Mapping[str, str]


class PluginPage(Raw):
    """The page of the GKE device plugin, as text."""

    kind: Literal["device_plugin"] = "device_plugin"
    text: str


class SdkValues(Raw):
    """The results of the libtpu SDK's calls, by its own names, `age_s` seconds ago."""

    kind: Literal["sdk"] = "sdk"
    values: Mapping[str, tuple[str, ...]]
    age_s: Annotated[float, Field(ge=0)]


class PciFunction(Raw):
    """The PCI function of a device with Google's vendor id."""

    address: str
    device: str
    iommu_group: str | None  # None without an IOMMU


class PciBus(Raw):
    """The PCI functions with Google's vendor id, in order of address."""

    kind: Literal["pci"] = "pci"
    functions: tuple[PciFunction, ...]


class PodList(Raw):
    """The kubelet's `ListPodResourcesResponse`, encoded."""

    kind: Literal["pod_resources"] = "pod_resources"
    answer: bytes


class AnnouncedWorkload(Raw):
    """The workload that a process of ours declares in `<run dir>/workloads/<pid>.json`.

    `started_ticks` is field 22 of its `/proc/<pid>/stat`: another process with its id has another.
    `chips` are chips of the host by index; `None` for all of them. `holds_host`: while it lives
    its replica has the host, whoever has the chips open.
    """

    pid: Annotated[int, Field(gt=0)]
    started_ticks: Annotated[int, Field(ge=0)]
    model: str
    deployment: str
    replica: str
    chips: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    holds_host: bool = False


class WorkloadFiles(Raw):
    """The files of live processes that hold chips, as far as can be observed."""

    kind: Literal["workloads"] = "workloads"
    workloads: tuple[AnnouncedWorkload, ...]
    unreadable: int = 0  # the number of files that are no such files


AnyRaw = Annotated[
    LibtpuAnswers | PluginPage | SdkValues | PciBus | PodList | WorkloadFiles,
    Field(discriminator="kind"),
]


class CollectError(Exception):
    """The source gave nothing. `code` is the reason; try again with the next scrape."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class Collector(Protocol):
    """The collector of one source at one address: real, fake or replayed."""

    @property
    def name(self) -> str:
        """The kind of source, as in the label `collector`."""

    @property
    def target(self) -> str:
        """The address, as in the label `target`; empty where there is only one."""

    def collect(self, timeout_s: float) -> AnyRaw | None:
        """Returns the present answer of the source; `None` where it is known to be absent.

        An absent source is no failure. The call returns within the timeout if the source lets it;
        callers do not rely on that.

        Raises:
            CollectError: the source gave nothing; its code says why.
        """


@dataclass(frozen=True, slots=True)
class CollectorSample:
    """The part of one collector in one scrape.

    `code` is OK, or why `raw` is `None`. With OK, `raw` is `None` if the source is known as absent.
    """

    collector: str
    target: str
    duration_s: float
    code: str
    raw: AnyRaw | None = None
    reason: str = ""
