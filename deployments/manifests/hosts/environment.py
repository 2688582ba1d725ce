"""What Ray's container on a TPU host has beside its rights: memory, variables, the cache. Pure."""

from deployments.manifests.cluster_config import ClusterConfig
from deployments.manifests.hosts.config import CacheConfig, CacheMedium, HostConfig
from deployments.manifests.hosts.rights import memlock_text
from deployments.manifests.names import RUN_FOLDER, Json
from serving.config.ray_settings import RECONNECT
from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.domain.topology import SliceShape
from serving.tpu.host.locked_memory import MEMLOCK_VARIABLE
from serving.tpu.machines import default_memory_gib

# Of a pod: compiled programs are below it by default, and what is downloaded.
CACHE_FOLDER = "/var/cache/slicewise"
DOWNLOADS = f"{CACHE_FOLDER}/huggingface"
# Of two threads on a core the second adds little to copying and converting weights.
_CPUS_PER_THREAD = 2


def host_memory_gib(host: HostConfig, shape: SliceShape) -> int:
    """Returns the memory of the pod on each host, which is also its limit."""
    if host.memory_gib_per_chip is None:
        return default_memory_gib(shape)
    return host.memory_gib_per_chip * shape.chips_per_host


def omp_threads(host: HostConfig, shape: SliceShape) -> int:
    """Returns the threads with which torch loads weights on each host."""
    if host.omp_threads is not None:
        return host.omp_threads
    return max(1, host.cpus_per_chip * shape.chips_per_host // _CPUS_PER_THREAD)


def reconnect(cluster: ClusterConfig) -> list[Json]:
    """Returns how long a Ray node without its head goes on; KubeRay's own default is 600 s.

    Source: KubeRay 1.7.0 `common/pod.go`, which sets it only where the template does not, read
    2026-11-23.
    """
    return [{"name": RECONNECT, "value": str(cluster.head_away_s)}]


def host_environment(host: HostConfig, shape: SliceShape) -> list[Json]:
    """Returns the variables that only hosts of slices have."""
    return [
        {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        # Where libtpu reaches the host's own service. Source: GKE's sample for several hosts at
        # 2b503651, read 2026-11-20.
        {"name": "VBAR_CONTROL_SERVICE_URL", "value": "$(NODE_IP):8353"},
        {"name": "HF_HOME", "value": DOWNLOADS},
        # Ray gives an actor with less than a CPU one thread, and sets what is not set. Source: Ray
        # 2.60 `_private/utils.py`, read 2026-11-23.
        {"name": "OMP_NUM_THREADS", "value": str(omp_threads(host, shape))},
        {"name": MEMLOCK_VARIABLE, "value": memlock_text(host)},
        {"name": RUN_DIR_VARIABLE, "value": RUN_FOLDER},
    ]


def cache_volume(cache: CacheConfig) -> Json:
    """Returns the volume of the cache. On local SSDs a pod's own disk is on them by itself."""
    if cache.medium == CacheMedium.MEMORY:
        return {
            "name": "cache",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{cache.size_gib}Gi"},
        }
    return {"name": "cache", "emptyDir": {}}
