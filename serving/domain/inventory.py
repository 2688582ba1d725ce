"""The whole slices that exist, and those of them that a replica may take.

Owns the reading of Ray's nodes as hosts of slices. Does not own the reservation: a slice is free
here until its placement group exists, and only the group decides who has it. Pure.

A slice's name is no identity: KubeRay gives the replacement of a lost slice the lost one's name,
and the TPU webhook has given one host's slice the name of a living one, as its worker 1 (recorded
from v1.3.5 on 2026-11-22). The set of its hosts' node ids is the identity.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
class ObservedHost:
    """The state of one live Ray node with TPU chips."""

    node_id: str
    address: str
    slice_name: str
    worker_id: int
    num_chips: int
    num_free_chips: int
    is_draining: bool
    labels: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """The kind of slice that a replica requests; `labels` are those of its compute class and zone.

    The replica gets `num_slices` such slices, all in one zone, or none.
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


@dataclass(frozen=True, slots=True)
class SliceMatches:
    """The slices of the requested kind: those that are free, and why each other one is not."""

    free: tuple[Slice, ...]
    refused: Mapping[str, str] = field(hash=False)


def observe_hosts(
    nodes: Iterable[Mapping[str, Any]],
    available: Mapping[str, Mapping[str, float]],
    draining: Iterable[str],
) -> list[ObservedHost]:
    """Returns the live hosts among Ray's `nodes`.

    `available` holds the free resources by node id. A node without a `TPU` entry there has no free
    chip, because Ray leaves out what is used up. `draining` are the node ids that Ray drains.
    """
    leaving = frozenset(draining)
    hosts = []
    for node in nodes:
        labels = node.get("Labels") or {}
        num_chips = int((node.get("Resources") or {}).get(_CHIPS, 0))
        if not node.get("Alive") or not num_chips or POD_TYPE_LABEL not in labels:
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
            )
        )
    return hosts


def match_slices(hosts: Iterable[ObservedHost], request: SliceRequest) -> SliceMatches:
    """Returns the slices of the requested kind, free ones and others, both sorted by name."""
    wanted = {**request.labels, POD_TYPE_LABEL: request.pod_type, TOPOLOGY_LABEL: request.topology}
    fitting = [host for host in hosts if _has_labels(host, wanted)]
    slices = _each_alone(fitting) if request.num_hosts == 1 else _by_name(fitting)
    free, refused = [], {}
    for name in sorted(slices):
        members = tuple(sorted(slices[name], key=lambda host: host.worker_id))
        reason = _refusal(members, request)
        if reason is None:
            free.append(Slice(name, members))
        else:
            refused[name] = reason
    return SliceMatches(tuple(free), refused)


def _has_labels(host: ObservedHost, wanted: Mapping[str, str]) -> bool:
    return all(host.labels.get(name) == value for name, value in wanted.items())


def _by_name(hosts: Iterable[ObservedHost]) -> dict[str, list[ObservedHost]]:
    slices: dict[str, list[ObservedHost]] = {}
    for host in hosts:
        slices.setdefault(host.slice_name, []).append(host)
    return slices


def _each_alone(hosts: Iterable[ObservedHost]) -> dict[str, list[ObservedHost]]:
    """Returns every host as a slice of its own, regardless of its name and worker id.

    A worker 0 keeps its name unless another has it too. All others get their node's id appended.
    """
    hosts = list(hosts)
    num_firsts = Counter(host.slice_name for host in hosts if host.worker_id == 0)
    slices = {}
    for host in hosts:
        name = host.slice_name
        if host.worker_id != 0 or num_firsts[name] > 1:
            name = f"{name}-{host.node_id[:_SHOWN_ID]}"
        slices[name] = [replace(host, slice_name=name, worker_id=0)]
    return slices


def _refusal(members: tuple[ObservedHost, ...], request: SliceRequest) -> str | None:
    """Returns why nobody may take this slice now; `None` if somebody may."""
    ids = [host.worker_id for host in members]
    if len(set(ids)) < len(ids):
        return f"two hosts have one worker id (of {ids}): it is being replaced"
    missing = sorted(set(range(request.num_hosts)) - set(ids))
    if missing:
        return f"host {missing[0]} of {request.num_hosts} is missing"
    if len(ids) > request.num_hosts:
        return f"it has {len(ids)} hosts, not {request.num_hosts}"
    for host in members:
        if host.num_chips != request.chips_per_host:
            return f"host {host.worker_id} has {host.num_chips} chips, not {request.chips_per_host}"
        if host.is_draining:
            return f"host {host.worker_id} drains"
        if host.num_free_chips < host.num_chips:
            return "it is taken"
    return None


def _worker_id(label: str | None) -> int:
    # A single host is worker 0 whether or not it reports so; nonsense fits no slice.
    if label is None:
        return 0
    return int(label) if label.isdecimal() else -1
