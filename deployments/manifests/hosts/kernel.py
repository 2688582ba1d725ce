"""Settings of hosts' kernels: by a ComputeClass, a node pool of your own, or an init container.

What GKE takes: its CRD of ComputeClass (8067eaeb) for all three settings; gcloud's reference of
`--system-config-from-file` for two, without DMA mappings. Both read 2026-11-23, neither was run.
Pure.
"""

import json

from deployments.manifests.cluster_config import ClusterConfig, Provisioning
from deployments.manifests.hosts.config import KernelSetter
from deployments.manifests.names import Json
from deployments.manifests.slice_groups import SliceGroup
from serving.tpu.machines import KernelSettings, kernel_settings

_MAPS = "vm.max_map_count"
_FILES = {
    "max_map_count": "/proc/sys/vm/max_map_count",
    "vfio_dma_entries": "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
    "transparent_hugepages": "/sys/kernel/mm/transparent_hugepage/enabled",
}


def wanted_kernel(cluster: ClusterConfig, group: SliceGroup) -> KernelSettings:
    """Returns what a group's hosts are to be set to: given values, else the generation's."""
    given = cluster.host.kernel
    if given.set_by == KernelSetter.NOBODY:
        return KernelSettings()
    defaults = kernel_settings(group.shape.generation)
    return KernelSettings(
        given.max_map_count or defaults.max_map_count,
        given.vfio_dma_entries or defaults.vfio_dma_entries,
        given.transparent_hugepages or defaults.transparent_hugepages,
    )


def kernel_setter(cluster: ClusterConfig, group: SliceGroup) -> KernelSetter:
    """Returns who sets them: GKE, unless pools of your own cannot be told of DMA mappings."""
    given = cluster.host.kernel.set_by
    if given is not None:
        return given
    is_own = cluster.provisioning == Provisioning.NODE_POOLS
    if is_own and wanted_kernel(cluster, group).vfio_dma_entries is not None:
        return KernelSetter.INIT_CONTAINER
    return KernelSetter.NODE_CONFIG


def class_rule(cluster: ClusterConfig, group: SliceGroup) -> Json:
    """Returns the `linuxNodeConfig` of a ComputeClass's rule; empty where GKE sets nothing."""
    if kernel_setter(cluster, group) != KernelSetter.NODE_CONFIG:
        return {}
    wanted = wanted_kernel(cluster, group)
    rule: Json = {}
    if wanted.max_map_count is not None:
        rule["sysctls"] = {_MAPS: wanted.max_map_count}
    if wanted.vfio_dma_entries is not None:
        rule["nodeVfioConfig"] = {"dmaEntryLimit": wanted.vfio_dma_entries}
    if wanted.transparent_hugepages is not None:
        rule["transparentHugepageEnabled"] = _googles(wanted.transparent_hugepages)
    return rule


def node_pool_config(cluster: ClusterConfig, group: SliceGroup) -> str:
    """Returns the text for gcloud's `--system-config-from-file`; "" where it sets nothing."""
    if kernel_setter(cluster, group) != KernelSetter.NODE_CONFIG:
        return ""
    wanted = wanted_kernel(cluster, group)
    linux: Json = {}
    if wanted.max_map_count is not None:
        linux["sysctl"] = {_MAPS: str(wanted.max_map_count)}
    if wanted.transparent_hugepages is not None:
        linux["transparentHugepageEnabled"] = _googles(wanted.transparent_hugepages)
    return json.dumps({"linuxConfig": linux}, sort_keys=True) if linux else ""


def init_containers(cluster: ClusterConfig, group: SliceGroup) -> list[Json]:
    """Returns the privileged container that sets the kernel before Ray starts; none elsewhere."""
    if kernel_setter(cluster, group) != KernelSetter.INIT_CONTAINER:
        return []
    wanted = wanted_kernel(cluster, group)
    # A file that is not there belongs to a module that this host does without.
    commands = [
        f"if [ -e {file} ]; then echo {value} > {file}; fi"
        for name, file in _FILES.items()
        if (value := getattr(wanted, name)) is not None
    ]
    if not commands:
        return []
    return [
        {
            "name": "host-kernel",
            "image": cluster.images.tpu,
            "command": ["/bin/sh", "-c", "set -e; " + "; ".join(commands)],
            "resources": {
                "limits": {"cpu": "100m", "memory": "64Mi"},
                "requests": {"cpu": "100m", "memory": "64Mi"},
            },
            "securityContext": {"privileged": True, "runAsNonRoot": False, "runAsUser": 0},
        }
    ]


def _googles(word: str) -> str:
    return f"TRANSPARENT_HUGEPAGE_ENABLED_{word.upper()}"
