"""Ray without Ray: nodes that say of themselves what their pods carry, and whose chips are taken.

It stands in at Ray's own interface, so that the product's directory and provisioner run above it
unchanged: `ray.nodes()`, the key-value store, the GCS client. Labels, resources and the pod's name
come from the pod alone, by the functions from which the real raylets of `raylets` have theirs. Ray
learns of the end of a node late; `dice` say how late.
"""

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._private import state as ray_state
from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus
from ray.experimental import internal_kv

from serving.directory import orphan_keeper, ray_hosts

from .raylets import described
from .start_command import variables_of

Json = dict[str, Any]

_LATE_S = 1.0


@dataclass
class _Node:
    """A Ray node. `ended_at_s` is when it ended; Ray shows it until `shown_until_s`."""

    node_id: str
    pod: str
    address: str
    labels: dict[str, str]
    resources: dict[str, float]
    holder: str | None = None
    ended_at_s: float | None = None
    shown_until_s: float = field(default=float("inf"))


class RayByHand:
    """The nodes of a Ray cluster, as `cloud.Hosts`, and what Ray says of them. Thread-safe."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}  # by pod; no pod's name comes back
        self._stored: dict[bytes, bytes] = {}

    # -- what runs in pods (`cloud.Hosts`) --

    def start(self, pod: Json) -> None:
        """The raylet of a pod registers."""
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        labels, resources = described(pod)
        node_id = hashlib.sha224(str(pod["metadata"]["uid"]).encode()).hexdigest()
        told = variables_of(pod)["RAY_CLOUD_INSTANCE_ID"]
        with self._lock:
            self._nodes[name] = _Node(node_id, told, address, labels, resources)

    def is_running(self, pod_name: str) -> bool:
        """Whether it is there."""
        with self._lock:
            node = self._nodes.get(pod_name)
            return node is not None and node.ended_at_s is None

    def stop(self, pod_name: str) -> None:
        """It ends; that it says goodbye makes no difference here."""
        self.kill(pod_name)

    def kill(self, pod_name: str) -> None:
        """It ends."""
        with self._lock:
            if (node := self._nodes.get(pod_name)) is not None:
                self._end(node)

    def lose_chips(self, pod_name: str) -> None:
        """Its host sees no chips any more, as with a broken driver."""
        with self._lock:
            self._nodes[pod_name].resources.pop("TPU")

    def _end(self, node: _Node) -> None:
        if node.ended_at_s is None:
            node.ended_at_s = time.monotonic()
            node.shown_until_s = node.ended_at_s + self._dice.uniform(0.0, _LATE_S)

    # -- who has chips, as placement groups say --

    def take(self, node_ids: Iterable[str], who: str) -> bool:
        """Takes every chip of these nodes, or nothing; whether it did."""
        wanted = set(node_ids)
        with self._lock:
            found = [node for node in self._nodes.values() if node.node_id in wanted]
            if any(node.ended_at_s is not None or node.holder is not None for node in found):
                return False
            for node in found:
                node.holder = who
            return len(found) == len(wanted)

    def release(self, who: str) -> None:
        """Gives back what somebody has."""
        with self._lock:
            for node in self._nodes.values():
                if node.holder == who:
                    node.holder = None

    def ended(self, node_ids: Iterable[str]) -> str | None:
        """The pod of one of these nodes that has ended; `None` while all run."""
        wanted = set(node_ids)
        with self._lock:
            ended = (each for each in self._nodes.values() if each.ended_at_s is not None)
            return next((node.pod for node in ended if node.node_id in wanted), None)

    # -- what Ray says --

    def _shown(self) -> list[_Node]:
        now_s = time.monotonic()
        with self._lock:
            return [node for node in self._nodes.values() if now_s < node.shown_until_s]

    def nodes(self) -> list[Json]:
        """As `ray.nodes` has them."""
        return [
            {
                "NodeID": node.node_id,
                "Alive": True,
                "NodeManagerAddress": node.address,
                "Labels": node.labels,
                "Resources": node.resources,
            }
            for node in self._shown()
        ]

    def available(self) -> dict[str, dict[str, float]]:
        """As `available_resources_per_node` has it: what is used up is left out."""
        return {
            node.node_id: node.resources if node.holder is None else {} for node in self._shown()
        }

    def get_all_node_info(self, state_filter: int) -> dict[bytes, Any]:
        """Of `GcsClient`: only that it knows the pods' names."""
        return {
            bytes.fromhex(node.node_id): SimpleNamespace(instance_id=node.pod)
            for node in self._shown()
        }

    def get_cluster_resource_state(self) -> bytes:
        """Of `GcsClient`, as the autoscaler reads it."""
        reply = GetClusterResourceStateReply()
        for node in self._shown():
            reply.cluster_resource_state.node_states.add(
                node_id=bytes.fromhex(node.node_id),
                instance_id=node.pod,
                node_ip_address=node.address,
                status=NodeStatus.IDLE if node.holder is None else NodeStatus.RUNNING,
                labels=node.labels,
            )
        return bytes(reply.SerializeToString())

    def drain_node(
        self, node_id: str, reason: int, message: str, deadline: int
    ) -> tuple[bool, str]:
        """Of `GcsClient`: an idle node ends at once."""
        with self._lock:
            (node,) = (each for each in self._nodes.values() if each.node_id == node_id)
            if node.holder is not None:
                return False, "it is not idle"
            self._end(node)
            return True, ""

    def internal_kv_get(
        self, key: bytes, namespace: bytes | None = None, timeout: float | None = None
    ) -> bytes | None:
        """Of `GcsClient`."""
        with self._lock:
            return self._stored.get(key)

    def internal_kv_keys(
        self, prefix: bytes, namespace: bytes | None = None, timeout: float | None = None
    ) -> list[bytes]:
        """Of `GcsClient`."""
        with self._lock:
            return [key for key in self._stored if key.startswith(prefix)]

    def internal_kv_put(
        self,
        key: bytes,
        value: bytes,
        overwrite: bool,
        namespace: bytes | None = None,
        timeout: float | None = None,
    ) -> int:
        """Of `GcsClient`."""
        with self._lock:
            self._stored[key] = value
        return 1


@contextlib.contextmanager
def standing_in(made: RayByHand, application: str) -> Iterator[None]:
    """The product in this process asks `made` instead of a Ray cluster."""
    runtime = SimpleNamespace(gcs_address="nowhere")
    replica = SimpleNamespace(app_name=application)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", made.nodes)
        patch.setattr(ray, "get_runtime_context", lambda: runtime)
        patch.setattr(ray_state, "available_resources_per_node", made.available)
        patch.setattr(ray_state.state, "get_draining_nodes", dict)
        patch.setattr(ray_hosts, "GcsClient", lambda **_: made)
        patch.setattr(orphan_keeper, "placement_group_table", dict)
        patch.setattr(internal_kv, "global_gcs_client", made)
        patch.setattr(serve, "get_replica_context", lambda: replica)
        yield
