"""Observes Ray's nodes. No other module asks Ray for its hosts."""

import asyncio

import ray
from ray._private import state as ray_state

from serving.domain.inventory import ObservedHost, observe_hosts


async def observe_cluster() -> list[ObservedHost]:
    """Returns the live TPU hosts as of now; takes tens of milliseconds, off the event loop."""
    return await asyncio.to_thread(_observe)


async def draining_nodes() -> dict[str, float | None]:
    """Returns the nodes that Ray drains, with the wall-clock end of each (`None`: not known)."""
    deadlines_ms: dict[str, int] = await asyncio.to_thread(ray_state.state.get_draining_nodes)
    return {node_id: at_ms / 1000 if at_ms else None for node_id, at_ms in deadlines_ms.items()}


def own_node_id() -> str:
    """Returns Ray's id of the host that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def own_address() -> str:
    """Returns the address at which Ray's other hosts reach the host of this process."""
    return str(ray.util.get_node_ip_address())


def _observe() -> list[ObservedHost]:
    return observe_hosts(
        ray.nodes(),
        ray_state.available_resources_per_node(),
        ray_state.state.get_draining_nodes(),
    )
