"""Reads RayClusters, RayServices and their pods as worker groups.

Owns the names of fields and labels. Pure: objects as the API returns them in, records out. KubeRay
(v1.7.0) gives a new replica the lowest free index, which is part of its slice's name. For slices of
one host it sets neither replica name nor host index. The TPU webhook may then give two living ones
the same name, so slices here go by KubeRay's index.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from autoscaling.provisioning.errors import UnusableError
from autoscaling.provisioning.groups import SliceKind, WorkerGroup
from serving.domain.inventory import ZONE_LABEL
from serving.domain.names.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
    TEMPLATE_HASH_ANNOTATION,
    hash_of_template,
)
from serving.domain.supply.pods import ObservedPod, ObservedSlice, PodPhase
from serving.domain.topology import Generation, TopologyError, shapes, slice_shape

# KubeRay's labels on pods. Source: KubeRay 1.7.0 `utils/constant.go`; `replicaIndex` is the TPU
# webhook's, with the group's name before the index; read 2026-11-20.
CLUSTER_LABEL = "ray.io/cluster"
NODE_TYPE_LABEL = "ray.io/node-type"
GROUP_LABEL = "ray.io/group"
REPLICA_NAME_LABEL = "ray.io/worker-group-replica-name"
REPLICA_INDEX_LABEL = "ray.io/worker-group-replica-index"
WEBHOOK_SLICE_LABEL = "replicaIndex"

# What the kubelet says of every container before it starts.
_ORDINARY = frozenset({"ContainerCreating", "PodInitializing"})

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """The pod of a worker group. Pods with the same `replica` are the hosts of one slice.

    `slice_name` is what the webhook puts into `TPU_NAME`, and Ray into its label for the slice,
    wherever the webhook goes by KubeRay's index too. `lone_name` is the slice's name if this is its
    only host. `owner_uid` is that of the RayCluster that made it; `None` if nobody did.
    `template_hash` names the template that it was made from; `None` if that had no name.
    """

    observed: ObservedPod
    group: str
    replica: str
    host_index: int
    slice_name: str
    lone_name: str
    is_being_deleted: bool = False
    owner_uid: str | None = None
    template_hash: str | None = None


def worker_pods_selector(raycluster: str) -> str:
    """The label selector of a cluster's worker pods."""
    return f"{CLUSTER_LABEL}={raycluster},{NODE_TYPE_LABEL}=worker"


def decode_worker_pod(text: bytes | msgspec.Raw) -> WorkerPod:
    """Reads a pod in the API's JSON; what is not needed is never made into objects.

    Raises:
        UnusableError: it is not a pod of a worker group as KubeRay 1.7 makes them.
    """
    try:
        return _worker_pod(msgspec.json.decode(text, type=_Pod))
    except (KeyError, ValueError) as error:
        raise UnusableError(f"not a pod as KubeRay 1.7 has it: {error!r}") from error


def owning_service(raycluster: Json) -> str | None:
    """The name of the RayService that made this cluster; `None` if none did."""
    for owner in raycluster["metadata"].get("ownerReferences") or ():
        if owner.get("kind") == "RayService":
            return str(owner["name"])
    return None


def read_groups(raycluster: Json, pods: Iterable[WorkerPod]) -> tuple[list[WorkerGroup], list[str]]:
    """The groups that make TPU slices, and why other TPU groups cannot be used.

    Pods of an earlier cluster of the same name are left out: they go with it.

    Raises:
        UnusableError: the cluster is not of the form that KubeRay 1.7 gives it.
    """
    by_group: dict[str, list[WorkerPod]] = {}
    groups: list[WorkerGroup] = []
    notes: list[str] = []
    try:
        uid = raycluster["metadata"].get("uid")
        for pod in pods:
            if None in (uid, pod.owner_uid) or pod.owner_uid == uid:
                by_group.setdefault(pod.group, []).append(pod)
        for spec in raycluster["spec"].get("workerGroupSpecs") or ():
            kind = _kind_of(spec)
            name = spec["groupName"]
            if isinstance(kind, str):
                notes.append(f"worker group {name} is not used: {kind}")
            elif kind is not None:
                groups.append(_read_group(spec, kind, by_group.get(name, [])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableError(f"not a RayCluster as KubeRay 1.7 has it: {error!r}") from error
    return groups, notes


def _kind_of(spec: Json) -> SliceKind | str | None:
    """Returns the kind of slices a group makes, or why it is unknown; `None` without TPUs."""
    selector = spec["template"]["spec"].get("nodeSelector") or {}
    limits = (spec["template"]["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    if GKE_CHIPS not in limits:
        return None
    compute_class = (spec.get("labels") or {}).get(COMPUTE_CLASS_LABEL)
    compute_class = compute_class or selector.get(GKE_COMPUTE_CLASS)
    if not compute_class:
        return f"it has neither a label {COMPUTE_CLASS_LABEL} nor a selector {GKE_COMPUTE_CLASS}"
    accelerator, topology = selector.get(GKE_ACCELERATOR), selector.get(GKE_TOPOLOGY)
    generation = _generation_of(accelerator)
    if generation is None or topology is None:
        return f"its node selector names no slice: {accelerator} {topology}"
    if spec.get("suspend"):
        return "it is suspended"
    try:
        shape = slice_shape(generation, topology, int(limits[GKE_CHIPS]))
    except TopologyError as error:
        return str(error)
    num_hosts = int(spec.get("numOfHosts", 1))
    if num_hosts != shape.num_hosts:
        return f"numOfHosts is {num_hosts}, a {generation} {topology} has {shape.num_hosts} hosts"
    return SliceKind(compute_class, str(shape.generation), shape.topology)


def _generation_of(gke_accelerator: str | None) -> Generation | None:
    for generation in Generation:
        if shapes(generation)[0].gke_accelerator == gke_accelerator:
            return generation
    return None


def _read_group(spec: Json, kind: SliceKind, pods: Sequence[WorkerPod]) -> WorkerGroup:
    # Pods that are being deleted count for nobody any more, Ray's autoscaler included.
    present = [pod for pod in pods if not pod.is_being_deleted]
    names = {pod.observed.name for pod in present}
    doomed = (spec.get("scaleStrategy") or {}).get("workersToDelete") or ()
    return WorkerGroup(
        name=spec["groupName"],
        kind=kind,
        replicas=int(spec["replicas"]),
        min_replicas=int(spec["minReplicas"]),
        max_replicas=int(spec["maxReplicas"]),
        num_hosts=int(spec.get("numOfHosts", 1)),
        slices=_read_slices(present, hash_of_template(spec["template"])),
        pods_pending_deletion=frozenset(names) & frozenset(doomed),
        zone=(spec.get("labels") or {}).get(ZONE_LABEL),
    )


def _read_slices(pods: Iterable[WorkerPod], template_hash: str | None) -> tuple[ObservedSlice, ...]:
    """Gathers a group's pods into slices, ordered by name, each with its hosts in order.

    `template_hash` is that of the group's template; `None` if it has none, then nothing is older.
    """
    replicas: dict[str, list[WorkerPod]] = {}
    for pod in pods:
        replicas.setdefault(pod.replica, []).append(pod)
    slices = [_slice_of(members, template_hash) for members in replicas.values()]
    return tuple(sorted(slices, key=lambda each: (each.name, each.incarnation)))


def _slice_of(members: Sequence[WorkerPod], template_hash: str | None) -> ObservedSlice:
    first = members[0]
    name = first.lone_name if len(members) == 1 else first.slice_name
    in_order = sorted(members, key=lambda pod: (pod.host_index, pod.observed.name))
    is_outdated = template_hash is not None and any(
        pod.template_hash != template_hash for pod in members
    )
    return ObservedSlice(name, tuple(pod.observed for pod in in_order), is_outdated)


class _Owner(msgspec.Struct, rename="camel"):
    uid: str = ""
    controller: bool = False


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[_Owner] = []
    deletion_timestamp: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str | None = None


class _Waiting(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct):
    waiting: _Waiting | None = None


class _Container(msgspec.Struct):
    state: _State = msgspec.field(default_factory=_State)


class _PodStatus(msgspec.Struct, rename={"pod_ip": "podIP"}):
    phase: str = PodPhase.PENDING
    pod_ip: str | None = None
    init_containers: list[_Container] = msgspec.field(name="initContainerStatuses", default=[])
    containers: list[_Container] = msgspec.field(name="containerStatuses", default=[])


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


def _worker_pod(pod: _Pod) -> WorkerPod:
    name, labels = pod.metadata.name, pod.metadata.labels
    group = labels[GROUP_LABEL]
    index = labels.get(REPLICA_INDEX_LABEL)
    indexed = f"{group}-{index}" if index else None
    status = pod.status
    owners = (each.uid for each in pod.metadata.owner_references if each.controller)
    return WorkerPod(
        observed=ObservedPod(
            name,
            PodPhase(status.phase),
            status.pod_ip,
            pod.spec.node_name,
            _hindrance((*status.init_containers, *status.containers)),
        ),
        group=group,
        replica=labels.get(REPLICA_NAME_LABEL, name),
        host_index=int(labels.get(HOST_INDEX_LABEL, 0)),
        slice_name=indexed or labels.get(WEBHOOK_SLICE_LABEL, name),
        lone_name=indexed or name,
        is_being_deleted=pod.metadata.deletion_timestamp is not None,
        owner_uid=next(owners, None),
        template_hash=pod.metadata.annotations.get(TEMPLATE_HASH_ANNOTATION),
    )


def _hindrance(containers: Iterable[_Container]) -> str | None:
    """Returns what keeps the first hindered container from starting."""
    for each in containers:
        waiting = each.state.waiting
        if waiting is not None and waiting.reason not in _ORDINARY:
            return ": ".join(text for text in (waiting.reason, waiting.message) if text) or None
    return None
