"""Rules of `cluster.host`: values that contradict each other, or what the hosts are. Pure."""

from collections.abc import Iterator, Sequence

from deployments.manifests.cluster_config import ClusterConfig, Provisioning
from deployments.manifests.hosts.config import CacheConfig, CacheMedium, HostConfig, KernelSetter
from deployments.manifests.hosts.rights import ROOT
from deployments.manifests.slice_groups import SliceGroup
from serving.domain.errors import Problem
from serving.tpu.machines import allocatable_memory_gib, boot_disk_types, machine_of

_HOST = "cluster.host"
# Of a machine's CPUs, what GKE's own pods and the exporter need: a guess of ours.
_CPUS_OF_OTHERS = 2


def host_problems(cluster: ClusterConfig, groups: Sequence[SliceGroup]) -> Iterator[Problem]:
    """Yields what is wrong with the hosts of these groups, each problem once."""
    host = cluster.host
    yield from _rights_problems(host)
    yield from _kernel_problems(cluster)
    yield from _cache_problems(host.cache)
    by_machine = {group.shape.gke_machine_type: group.shape for group in groups}
    for name, shape in sorted(by_machine.items()):
        machine = machine_of(shape)
        cpus, most = host.cpus_per_chip * shape.chips_per_host, machine.num_cpus - _CPUS_OF_OTHERS
        if cpus > most:
            yield Problem(
                f"{_HOST}.cpus_per_chip",
                f"{cpus} CPUs are more than {name} leaves a pod",
                f"allowed: at most {most // shape.chips_per_host}",
                f"{host.cpus_per_chip}",
            )
        room_gib = allocatable_memory_gib(machine)
        per_chip = host.memory_gib_per_chip
        if per_chip is not None and per_chip * shape.chips_per_host > room_gib:
            yield Problem(
                f"{_HOST}.memory_gib_per_chip",
                f"of {machine.memory_gib} GiB of {name} pods may have {room_gib:.0f}",
                f"allowed: at most {int(room_gib) // shape.chips_per_host}",
                f"{per_chip}",
            )
    disk = host.boot_disk.type
    for generation in sorted({group.shape.generation for group in groups}):
        known = boot_disk_types(generation)
        if disk is not None and disk not in known:
            complaint = f"hosts of {generation} start from no such disk"
            yield Problem(
                f"{_HOST}.boot_disk.type", complaint, f"allowed: {', '.join(known)}", disk
            )


def _rights_problems(host: HostConfig) -> Iterator[Problem]:
    rights = host.rights
    path = f"{_HOST}.rights.capabilities"
    if rights.capabilities:
        given = ", ".join(rights.capabilities)
        if rights.privileged:
            yield Problem(path, "a privileged container has all of them", "allowed: nothing", given)
        elif rights.user != ROOT:
            complaint = f"user {rights.user} would not have them: Kubernetes gives them to root"
            yield Problem(path, complaint, f"allowed: nothing, or user {ROOT}", given)


def _kernel_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    kernel = cluster.host.kernel
    given = {
        "max_map_count": kernel.max_map_count,
        "vfio_dma_entries": kernel.vfio_dma_entries,
        "transparent_hugepages": kernel.transparent_hugepages,
    }
    for name, value in given.items():
        if value is not None and kernel.set_by == KernelSetter.NOBODY:
            complaint = "nobody would set it"
            allowed = "allowed: nothing, or another cluster.host.kernel.set_by"
            yield Problem(f"{_HOST}.kernel.{name}", complaint, allowed, f"{value}")
    is_own = cluster.provisioning == Provisioning.NODE_POOLS
    if kernel.vfio_dma_entries and is_own and kernel.set_by == KernelSetter.NODE_CONFIG:
        yield Problem(
            f"{_HOST}.kernel.set_by",
            "gcloud cannot set vfio_dma_entries of a node pool",
            f"allowed: {KernelSetter.INIT_CONTAINER}",
            KernelSetter.NODE_CONFIG,
        )


def _cache_problems(cache: CacheConfig) -> Iterator[Problem]:
    needed = {
        "num_local_ssds": (CacheMedium.LOCAL_SSD, cache.num_local_ssds),
        "size_gib": (CacheMedium.MEMORY, cache.size_gib),
    }
    for name, (medium, value) in needed.items():
        path = f"{_HOST}.cache.{name}"
        if cache.medium == medium and value is None:
            yield Problem(path, f"missing, and the cache is on {medium}", "required: a number")
        if cache.medium != medium and value is not None:
            allowed = f"allowed: nothing, or medium {medium}"
            yield Problem(path, f"the cache is on {cache.medium}", allowed, f"{value}")
