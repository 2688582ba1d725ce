"""Defines the part `host` of a values file: what TPU hosts are like, and what Ray may do on them.

Defaults that differ by generation are left out here; they and their sources are in
`serving.tpu.machines`. Pure.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field

from serving.config.sections import STRICT_SECTION, Items
from serving.tpu.machines import DEFAULT_BOOT_DISK_GB

Capability = Annotated[
    str,
    Field(
        pattern=r"^[A-Z][A-Z_]{1,30}$",
        json_schema_extra={"allowed": "a capability without `CAP_`, such as `SYS_RESOURCE`"},
    ),
]


class _Section(BaseModel):
    model_config = STRICT_SECTION


class KernelSetter(StrEnum):
    """Who sets the kernels of TPU hosts."""

    NODE_CONFIG = "node_config"  # GKE, as the ComputeClass or the node pool says
    INIT_CONTAINER = "init_container"  # a privileged container of each pod, before Ray
    NOBODY = "nobody"


class Hugepages(StrEnum):
    """When anonymous memory is of transparent hugepages."""

    ALWAYS = "always"
    MADVISE = "madvise"
    NEVER = "never"


class DiskType(StrEnum):
    """The types of boot disk that GKE's CRD of ComputeClass knows (8067eaeb), as it names them."""

    BALANCED = "pd-balanced"
    STANDARD = "pd-standard"
    SSD = "pd-ssd"
    HYPERDISK = "hyperdisk-balanced"


class CacheMedium(StrEnum):
    """What a host's cache lies on."""

    BOOT_DISK = "boot_disk"
    LOCAL_SSD = "local_ssd"
    MEMORY = "memory"


class HostUser(_Section):
    """The rights of Ray's container on a TPU host. libtpu locks memory for DMA with the chips."""

    user: Annotated[int, Field(ge=0, le=65_534)] = 0
    """User id. Root by default: only root has the added capabilities. 1000 is the image's own."""
    capabilities: Annotated[tuple[Capability, ...], Items] | None = None
    """Capabilities beside none; by default root's `IPC_LOCK` and `SYS_RESOURCE`, another user's
    nothing. With the first the limit of locked memory does not count, with the second it can be
    raised."""
    privileged: bool = False
    """All rights, as upstream's tests have them; needed by GKE nodes older than 1.28."""
    memlock_gib: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Locked memory that processes ask for, in GiB; unlimited, when left out. What the host does
    not grant, `slicewise doctor` and the probe report."""


class KernelConfig(_Section):
    """Settings of the hosts' kernels. What is left out has the default of the generation."""

    set_by: Annotated[KernelSetter, Field(strict=False)] | None = None
    """`node_config` (GKE), `init_container` (a privileged one in each pod) or `nobody`; by default
    GKE, and an init container for what pools of your own cannot be told."""
    max_map_count: Annotated[int, Field(ge=65_536, le=2_147_483_647)] | None = None
    """`vm.max_map_count`: memory maps of a process."""
    vfio_dma_entries: Annotated[int, Field(ge=65_535, le=4_194_304)] | None = None
    """`dma_entry_limit` of `vfio_iommu_type1`: DMA mappings of a container."""
    transparent_hugepages: Annotated[Hugepages, Field(strict=False)] | None = None
    """`always`, `madvise` or `never`."""


class BootDiskConfig(_Section):
    """The disk that a TPU host starts from. Images, logs and, by default, weights are on it."""

    type: Annotated[DiskType, Field(strict=False)] | None = None
    """By default the generation's: hyperdisk-balanced for v6e and tpu7x, else pd-balanced."""
    size_gb: Annotated[int, Field(ge=10, le=65_536)] = DEFAULT_BOOT_DISK_GB
    """Its size, in GB. GKE keeps half of a small one for itself, and 100 GiB of a large one."""


class CacheConfig(_Section):
    """Where downloaded weights (`HF_HOME`) and compiled programs lie on a TPU host."""

    medium: Annotated[CacheMedium, Field(strict=False)] = CacheMedium.BOOT_DISK
    """`boot_disk`, `local_ssd` or `memory`, which counts as the pod's own."""
    num_local_ssds: Annotated[int, Field(ge=1, le=32)] | None = None
    """Local SSDs of 375 GiB each; of `local_ssd`."""
    size_gib: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most of it, in GiB; of `memory`."""


class HostConfig(_Section):
    """What a pod on a TPU host asks for beside the chips, and what its host is like."""

    cpus_per_chip: Annotated[int, Field(ge=1, le=256)] = 16
    """CPUs for each chip of the host."""
    memory_gib_per_chip: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Memory for each chip of the host, in GiB; also its limit. By default nine tenths of what GKE
    leaves pods of the machine type. Weights may pass through it as a whole."""
    omp_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """`OMP_NUM_THREADS` of engines, which Ray would set to 1; by default half of the CPUs."""
    rights: HostUser = HostUser()
    """The rights of Ray's container."""
    kernel: KernelConfig = KernelConfig()
    """Settings of the hosts' kernels."""
    boot_disk: BootDiskConfig = BootDiskConfig()
    """The disk that a host starts from."""
    cache: CacheConfig = CacheConfig()
    """Where weights and compiled programs lie."""
