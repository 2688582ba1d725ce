"""The hosts that Ray has, and the words for the slices that they make and replicas request.

Owns the reading of Ray's nodes as hosts. Which slices they make is found by `supply.found`. Pure.

A slice's name is no identity: KubeRay gives the replacement of a lost slice the lost one's name,
and the TPU webhook has given one host's slice the name of a living one, as its worker 1 (recorded
from v1.3.5 on 2026-11-22). Its pods are the identity where Kubernetes is known, and otherwise the
set of its hosts' node ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from serving.domain.topology import Generation, SliceShape, TopologyError, shapes, slice_shape

# Labels that Ray puts on every node of a slice (ray/_private/accelerators/tpu.py, 2.60).
SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
WORKER_ID_LABEL = "ray.io/tpu-worker-id"
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
TOPOLOGY_LABEL = "ray.io/tpu-topology"
ZONE_LABEL = "ray.io/availability-zone"
NODE_ID_LABEL = "ray.io/node-id"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
_CHIPS = "TPU"
# Digits that are shown of a node id's 56: enough to distinguish the nodes of any fleet.
_SHOWN_ID = 12
# Ray's spelling of a generation, as pod types begin with it.
_GENERATIONS = {shapes(each)[0].ray_pod_type.rpartition("-")[0]: each for each in Generation}


@dataclass(frozen=True, slots=True)
class ObservedHost:
    """The state of one live Ray node of a slice; one without chips is a host that is ill.

    `instance_id` is the name of its pod where KubeRay made it, and empty where nobody told Ray.
    """

    node_id: str
    address: str
    slice_name: str
    worker_id: int
    num_chips: int
    num_free_chips: int
    is_draining: bool
    labels: Mapping[str, str] = field(hash=False)
    instance_id: str = ""

    @property
    def shape(self) -> SliceShape | None:
        """The shape of the slice that the host says it is of; `None` if there is none such."""
        generation = _GENERATIONS.get(self.labels.get(POD_TYPE_LABEL, "").rpartition("-")[0])
        if generation is None:
            return None
        try:
            shape = slice_shape(generation, self.labels.get(TOPOLOGY_LABEL, ""), self.num_chips)
        except TopologyError:
            return None
        return shape if shape.ray_pod_type == self.labels[POD_TYPE_LABEL] else None


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """The kind of slice that a replica requests; `labels` are those of its compute class and zone.

    Hosts that name their compute class must name this one. The replica gets `num_slices` such
    slices, all in one zone, or none.
    """

    compute_class: str
    pod_type: str
    topology: str
    num_hosts: int
    chips_per_host: int
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    num_slices: int = 1


@dataclass(frozen=True, slots=True)
class Slice:
    """The name and hosts of one whole slice; `hosts` are in the order of their worker ids."""

    name: str
    hosts: tuple[ObservedHost, ...]

    @property
    def node_ids(self) -> frozenset[str]:
        """The identity of the slice, whatever its name is."""
        return frozenset(host.node_id for host in self.hosts)

    @property
    def zone(self) -> str | None:
        """The zone that the slice's hosts name; `None` where they name none."""
        return self.hosts[0].labels.get(ZONE_LABEL)


def observe_hosts(
    nodes: Iterable[Mapping[str, Any]],
    available: Mapping[str, Mapping[str, float]],
    draining: Iterable[str],
    instance_ids: Mapping[str, str] = MappingProxyType({}),
) -> list[ObservedHost]:
    """Returns the live hosts among Ray's `nodes`.

    `available` holds the free resources by node id. A node without a `TPU` entry there has no free
    chip, because Ray leaves out what is used up. `draining` are the node ids that Ray drains.
    `instance_ids` are the pods' names by node id, where there are any.
    """
    leaving = frozenset(draining)
    hosts = []
    for node in nodes:
        labels = node.get("Labels") or {}
        num_chips = int((node.get("Resources") or {}).get(_CHIPS, 0))
        if not node.get("Alive") or POD_TYPE_LABEL not in labels:
            continue
        node_id = str(node["NodeID"])
        hosts.append(
            ObservedHost(
                node_id=node_id,
                address=str(node.get("NodeManagerAddress", "")),
                # A single-host slice needs no name of its own; Ray names such by their node.
                slice_name=labels.get(SLICE_NAME_LABEL) or f"node-{node_id[:_SHOWN_ID]}",
                worker_id=_worker_id(labels.get(WORKER_ID_LABEL)),
                num_chips=num_chips,
                num_free_chips=int(available.get(node_id, {}).get(_CHIPS, 0)),
                is_draining=node_id in leaving,
                labels=labels,
                instance_id=instance_ids.get(node_id, ""),
            )
        )
    return hosts


def _worker_id(label: str | None) -> int:
    # A single host is worker 0 whether or not it reports so; nonsense fits no slice.
    if label is None:
        return 0
    return int(label) if label.isdecimal() else -1
