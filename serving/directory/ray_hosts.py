"""Observes Ray's nodes. No other module asks Ray for its hosts."""

import asyncio

import ray
from ray._private import state as ray_state
from ray._raylet import GcsClient  # type: ignore[attr-defined] # Cython has no stubs
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from serving.domain.inventory import ObservedHost, observe_hosts

_ALIVE = GcsNodeInfo.GcsNodeState.Value("ALIVE")
_known_pods: dict[str, str] = {}


async def observe_cluster() -> list[ObservedHost]:
    """Returns the live TPU hosts as of now; takes tens of milliseconds, off the event loop."""
    return await asyncio.to_thread(_observe)


async def draining_nodes() -> dict[str, float | None]:
    """Returns the nodes that Ray drains, with the wall-clock end of each (`None`: not known)."""
    deadlines_ms: dict[str, int] = await asyncio.to_thread(ray_state.state.get_draining_nodes)
    return {node_id: at_ms / 1000 if at_ms else None for node_id, at_ms in deadlines_ms.items()}


async def node_addresses() -> dict[str, tuple[str, int]]:
    """Returns where the Ray node of each live host listens, by node id.

    Raises whatever Ray does without a head.
    """
    nodes = await asyncio.to_thread(ray.nodes)
    return {
        str(node["NodeID"]): (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
        for node in nodes
        if node["Alive"]
    }


async def is_listening(address: tuple[str, int], timeout_s: float) -> bool:
    """Returns whether a Ray node takes connections at its address; asks nobody else."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


def own_node_id() -> str:
    """Returns Ray's id of the host that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def own_address() -> str:
    """Returns the address at which Ray's other hosts reach the host of this process."""
    return str(ray.util.get_node_ip_address())


def _observe() -> list[ObservedHost]:
    nodes = ray.nodes()
    return observe_hosts(
        nodes,
        ray_state.available_resources_per_node(),
        ray_state.state.get_draining_nodes(),
        _pods_of({node["NodeID"] for node in nodes if node["Alive"]}),
    )


def _pods_of(node_ids: set[str]) -> dict[str, str]:
    """Returns the pod of each of these nodes, which never changes, by node id; empty: none told.

    `ray.nodes()` leaves it out. Source: Ray 2.60, 2026-11-23.
    """
    if not node_ids <= _known_pods.keys():
        gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        _known_pods.clear()
        for node_id, info in gcs.get_all_node_info(state_filter=_ALIVE).items():
            _known_pods[node_id.hex()] = info.instance_id
        # What has come or gone meanwhile is not asked for again and again.
        _known_pods.update(dict.fromkeys(node_ids - _known_pods.keys(), ""))
    return _known_pods
