"""Makes sure before a slice is dropped that it is free and can no longer be taken.

A directory knows a moment later than Ray does who has a slice, and nothing at all just after a
restart. The hosts themselves know. Ray's raylet has one question for this, that of its own
autoscaler: "end, if you are idle". It is refused while a placement group or an actor is on the
host; once it is accepted, nothing is placed there any more and the Ray node ends.

Owns that question, host by host. Worker 0 is asked first: a slice is held with all of its hosts, so
a replica that holds it, or is about to, keeps worker 0 busy.
"""

import asyncio
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined] # Cython has no stubs
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import DrainNodeReason, NodeState, NodeStatus

from serving.domain.supply.pods import ObservedSlice

_SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
_WORKER_ID_LABEL = "ray.io/tpu-worker-id"
_IDLE_TERMINATION = DrainNodeReason.Value("DRAIN_NODE_REASON_IDLE_TERMINATION")


class RayFence:
    """The fence of a Ray cluster. A slice without Ray nodes (still to come) needs none."""

    def __init__(self, gcs: GcsClient) -> None:
        self._gcs = gcs

    async def __call__(self, each: ObservedSlice) -> str | None:
        """Closes the slice; see `AskFence`. Takes tens of milliseconds and cannot be cancelled."""
        return await asyncio.shield(asyncio.to_thread(self._close, each))

    def _close(self, each: ObservedSlice) -> str | None:
        nodes = self._nodes_of(each)
        for node in nodes:
            if node.status == NodeStatus.RUNNING:
                return f"host {_worker_id(node)} is in use"
        for node in nodes:
            accepted, complaint = self._gcs.drain_node(
                node.node_id.hex(), _IDLE_TERMINATION, f"slice {each.name} is dropped", 0
            )
            if not accepted:
                return f"host {_worker_id(node)} refuses to end: {complaint}"
        return None

    def _nodes_of(self, each: ObservedSlice) -> list[NodeState]:
        """The slice's live Ray nodes by worker id."""
        nodes = get_cluster_resource_state(self._gcs).node_states
        found = [node for node in nodes if is_host_of(node, each)]
        return sorted(found, key=_worker_id)


def is_host_of(node: NodeState, each: ObservedSlice) -> bool:
    """Returns whether a Ray node is alive and one of the slice's hosts.

    KubeRay gives a Ray node its pod's name. Where it does not, a single host is known by its
    address, because another living slice may have the same name; a host without an address is still
    to come. For several hosts the name has to do. It may match a host of the slice before, which is
    as unwanted.
    """
    if node.status == NodeStatus.DEAD:
        return False
    if node.instance_id:
        return node.instance_id in {pod.name for pod in each.pods}
    if len(each.pods) == 1:
        return node.node_ip_address in each.addresses
    return bool(node.labels.get(_SLICE_NAME_LABEL) == each.name)


def _worker_id(node: Any) -> int:
    return int(node.labels.get(_WORKER_ID_LABEL) or 0)
