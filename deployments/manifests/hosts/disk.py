"""The disks of TPU hosts. Pure."""

from deployments.manifests.hosts.config import CacheMedium, HostConfig
from serving.domain.topology import Generation
from serving.tpu.machines import boot_disk_types


def boot_disk_type(host: HostConfig, generation: Generation) -> str:
    """Returns the type of boot disk: the given one, else the generation's."""
    given = host.boot_disk.type
    return boot_disk_types(generation)[0] if given is None else given.value


def local_ssds(host: HostConfig) -> int | None:
    """Returns the number of local SSDs of each host; `None` without."""
    return host.cache.num_local_ssds if host.cache.medium == CacheMedium.LOCAL_SSD else None
