"""The machines of TPU hosts: memory, CPUs, disks, and what GKE keeps of them for itself.

Owns those figures and the arithmetic of what a pod may have. Which machine a slice has is
`serving.domain.topology`'s. Nothing here was measured. Pure.
"""

from dataclasses import dataclass

from serving.domain.topology import GIB, Generation, SliceShape

GB = 1000**3  # in which disks are sold

HYPERDISK, BALANCED, SSD = "hyperdisk-balanced", "pd-balanced", "pd-ssd"
# GKE's own default for a boot disk, in GB: gcloud's reference of `container node-pools create
# --disk-size`, by an excerpt of it (2026-11-23).
DEFAULT_BOOT_DISK_GB = 100
# Local SSDs come in this size. Source: GKE's page on local SSDs, read 2026-11-23.
LOCAL_SSD_GIB = 375


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine type as it is sold: vCPUs and memory in GiB."""

    num_cpus: int
    memory_gib: int


# Source: GKE's page "Plan TPUs" (column "Memory (GiB)") and Cloud TPU's pages of v5e and v6e, by
# excerpts of them, read 2026-11-23; v4 and v5p by memory. Google's own pages conflict on
# ct6e-standard-1t: 448 GiB on GKE's, 176 GB on Cloud TPU's; the smaller one stands here. GKE's
# cluster autoscaler counts 180 vCPUs of ct6e-standard-8t and once 280 of -4t (a test of its, at
# 7d250507); its page says 180 of both.
_MACHINES = {
    "ct4p-hightpu-4t": Machine(240, 407),
    "ct5lp-hightpu-1t": Machine(24, 48),
    "ct5lp-hightpu-4t": Machine(112, 192),
    "ct5lp-hightpu-8t": Machine(224, 384),
    "ct5p-hightpu-4t": Machine(208, 448),
    "ct6e-standard-1t": Machine(44, 176),
    "ct6e-standard-4t": Machine(180, 720),
    "ct6e-standard-8t": Machine(180, 1440),
    "tpu7x-standard-4t": Machine(224, 960),
}
# The disks a host can start from, the default first. Source: Cloud TPU's page on storage options,
# read 2026-11-23: Hyperdisk Balanced for TPU7x and v6e, Balanced Persistent Disk for v5p and v5e;
# v4, which it leaves out, as v5p. Other pages of Google's conflict: GKE's examples for v6e give no
# type, for which GKE's documented default is pd-balanced.
_BOOT_DISKS = {
    Generation.V4: (BALANCED, SSD),
    Generation.V5E: (BALANCED, SSD),
    Generation.V5P: (BALANCED, SSD),
    Generation.V6E: (HYPERDISK,),
    Generation.TPU7X: (HYPERDISK,),
}


def machine_of(shape: SliceShape) -> Machine:
    """Returns the machine of each host of a slice."""
    return _MACHINES[shape.gke_machine_type]


def boot_disk_types(generation: Generation) -> tuple[str, ...]:
    """Returns the types of boot disk that hosts of a generation can have, the default first."""
    return _BOOT_DISKS[generation]


# Of these and of the next: GKE's page "Plan GKE Standard node sizes", by memory; only its opening
# could be read (2026-11-23). A third-party calculator quotes the same steps for memory. What a node
# itself says that it can allocate (`kubectl get node`) goes before them.
_MEMORY_STEPS_GIB = ((4, 0.25), (4, 0.20), (8, 0.10), (112, 0.06))
_MEMORY_REST_RATIO = 0.02
_MEMORY_EVICTION_GIB = 100 / 1024


def allocatable_memory_gib(machine: Machine) -> float:
    """Returns the memory of a GKE node that pods may ask for, in GiB."""
    left, kept = float(machine.memory_gib), _MEMORY_EVICTION_GIB
    for step, ratio in _MEMORY_STEPS_GIB:
        here = min(left, step)
        kept += here * ratio
        left -= here
    return machine.memory_gib - kept - left * _MEMORY_REST_RATIO


# Its example, a node with a disk of 100 GB on which pods may use 47.1 GB, fits only if the share of
# the system is reckoned in GiB for each GB.
_DISK_EVICTION_RATIO = 0.10
_DISK_SYSTEM_RATIO, _DISK_SYSTEM_GIB, _DISK_SYSTEM_MOST_GIB = 0.35, 6, 100
_SSD_SYSTEM_GIB = (50, 75, 100)  # of one, two, and three or more; not confirmed by any page


def pods_boot_disk_bytes(size_gb: int) -> int:
    """Returns what pods may use of a node's boot disk: GKE keeps a share of it for itself."""
    system_gib = min(
        size_gb / 2, _DISK_SYSTEM_GIB + _DISK_SYSTEM_RATIO * size_gb, _DISK_SYSTEM_MOST_GIB
    )
    return max(0, int(size_gb * GB * (1 - _DISK_EVICTION_RATIO) - system_gib * GIB))


def boot_disk_gb_for(num_bytes: int) -> int:
    """Returns the smallest boot disk, in steps of 50 GB, on which pods may use so much."""
    size_gb = 50
    while pods_boot_disk_bytes(size_gb) < num_bytes:
        size_gb += 50
    return size_gb


def pods_local_ssd_bytes(count: int) -> int:
    """Returns what pods may use of a node's `count` local SSDs as ephemeral storage."""
    system = _SSD_SYSTEM_GIB[min(count, len(_SSD_SYSTEM_GIB)) - 1] * GIB
    return max(0, int(count * LOCAL_SSD_GIB * GIB * (1 - _DISK_EVICTION_RATIO)) - system)


# A pod's own share: GKE's own pods on each node, and the sidecars beside Ray, need the rest.
_POD_RATIO = 0.9


def default_memory_gib(shape: SliceShape) -> int:
    """Returns the memory of a pod that has a host for itself, in GiB."""
    return int(allocatable_memory_gib(machine_of(shape)) * _POD_RATIO)


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Settings of a host's kernel; `None` leaves one as the node image has it.

    `max_map_count` are memory maps of a process, `vfio_dma_entries` DMA mappings of a container,
    `transparent_hugepages` the word for /sys/kernel/mm/transparent_hugepage/enabled.
    """

    max_map_count: int | None = None
    vfio_dma_entries: int | None = None
    transparent_hugepages: str | None = None


# The first two: tpu-inference's manifest for disaggregated serving on TPU7x and public walkthroughs
# for vLLM on it, which call both required; read 2026-11-23. Nobody's sample sets them for the
# others. Google's own pages name neither; GKE's CRD of ComputeClass (8067eaeb) has fields for both,
# "often critical for TPUs", and calls 65535 the kernel's default.
# Hugepages: JAX 0.10.2 `cloud_tpu_init.py` asks for `always` on v5e and newer, because the TPU
# runtime starts and ends faster then; read 2026-11-23. GKE's default is `madvise`.
_KERNEL = {
    Generation.V4: KernelSettings(),
    Generation.V5E: KernelSettings(None, None, "always"),
    Generation.V5P: KernelSettings(None, None, "always"),
    Generation.V6E: KernelSettings(None, None, "always"),
    Generation.TPU7X: KernelSettings(8_388_608, 2_000_000, "always"),
}


def kernel_settings(generation: Generation) -> KernelSettings:
    """Returns what hosts of a generation are set to by default."""
    return _KERNEL[generation]
