"""How many pods the control processes of an installation need, and how large they are. Pure."""

import math
from collections.abc import Iterator

from deployments.manifests.cluster_config import ClusterConfig, ControlPoolConfig
from serving.config.application import AppConfig, processes_per_node
from serving.domain.errors import Problem

_FIELD = "cluster.control_pool"
_MIB_PER_GIB = 1024
# Measured on 2026-11-23 with Ray 2.60 on Linux: a slice replica has 101 MiB of its own, directory
# and dashboard 94 and 89; with half as much again. A node has about 450 MiB for Ray's raylet and
# agents and Serve's proxy, and its object store.
_PROCESS_MIB, _NODE_MIB = 150, 1024
# So that one can be away.
_LEAST_PODS = 2


def least_pods(num_processes: int, cpus: float) -> int:
    """Returns the fewest pods that have room for so many processes while one of them is away."""
    return max(_LEAST_PODS, math.ceil(num_processes / processes_per_node(cpus)) + 1)


def num_control_pods(cluster: ClusterConfig, app: AppConfig) -> int:
    """Returns how many pods of control processes there are."""
    pool = cluster.control_pool
    if pool.pods is not None:
        return pool.pods
    return least_pods(app.num_control_processes, pool.cpus)


def control_pool_problems(cluster: ClusterConfig, app: AppConfig) -> Iterator[Problem]:
    """Yields what of the pool is too small for the application."""
    pool = cluster.control_pool
    least = least_pods(app.num_control_processes, pool.cpus)
    if pool.pods is not None and pool.pods < least:
        complaint = (
            f"too few for {app.num_control_processes} control processes while one pod is away: "
            f"each takes {processes_per_node(pool.cpus)}"
        )
        allowed = f"allowed: at least {least}, or more cpus"
        yield Problem(f"{_FIELD}.pods", complaint, allowed, f"{pool.pods}")
    if pool.memory_gib < (needed := least_memory_gib(pool)):
        complaint = f"too little for the {processes_per_node(pool.cpus)} processes of a pod"
        allowed = f"allowed: at least {needed}, or fewer cpus"
        yield Problem(f"{_FIELD}.memory_gib", complaint, allowed, f"{pool.memory_gib}")


def least_memory_gib(pool: ControlPoolConfig) -> int:
    """Returns the memory of a pod on which there are as many processes as its CPUs take."""
    needed_mib = _NODE_MIB + processes_per_node(pool.cpus) * _PROCESS_MIB
    return math.ceil(needed_mib / _MIB_PER_GIB)
