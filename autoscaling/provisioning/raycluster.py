"""Reads RayClusters, RayServices and pods as worker groups, and makes JSON patches to scale them.

Owns the names of fields and labels. Pure: objects as the API returns them in, records or patches
out. KubeRay's rules that matter here (v1.7.0, numOfHosts above 1): one replica is one slice;
`workersToDelete` naming any pod of it deletes all; nothing else is deleted while Ray's autoscaler
is on, however far the count falls; a new replica gets the lowest free index, which is part of its
slice's name. For slices of one host it sets neither replica name nor host index. The TPU webhook
may then give two living ones the same name, so slices here go by KubeRay's index.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoscaling.provisioning.demand import SliceKind
from autoscaling.provisioning.errors import UnusableError
from autoscaling.provisioning.groups import ObservedPod, ObservedSlice, PodPhase, WorkerGroup
from autoscaling.provisioning.plan import Change
from serving.domain.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
)
from serving.domain.topology import Generation, TopologyError, shapes, slice_shape

# KubeRay's labels on pods. Source: KubeRay 1.7.0 `utils/constant.go`; `replicaIndex` is the TPU
# webhook's, with the group's name before the index; read 2026-11-20.
CLUSTER_LABEL = "ray.io/cluster"
NODE_TYPE_LABEL = "ray.io/node-type"
GROUP_LABEL = "ray.io/group"
REPLICA_NAME_LABEL = "ray.io/worker-group-replica-name"
REPLICA_INDEX_LABEL = "ray.io/worker-group-replica-index"
WEBHOOK_SLICE_LABEL = "replicaIndex"

Json = Mapping[str, Any]


def worker_pods_selector(raycluster: str) -> str:
    """The label selector of a cluster's worker pods."""
    return f"{CLUSTER_LABEL}={raycluster},{NODE_TYPE_LABEL}=worker"


def owning_service(raycluster: Json) -> str | None:
    """The name of the RayService that made this cluster; `None` if none did."""
    for owner in raycluster["metadata"].get("ownerReferences") or ():
        if owner.get("kind") == "RayService":
            return str(owner["name"])
    return None


def mirrored_groups(rayservice: Json, raycluster: str) -> list[Json]:
    """The RayService's worker groups, if their counts are to follow those of `raycluster`.

    They are not while it upgrades: there are two clusters then, each with counts of its own. The
    new one started from what was mirrored last.
    """
    status = rayservice.get("status") or {}
    active = (status.get("activeServiceStatus") or {}).get("rayClusterName")
    pending = (status.get("pendingServiceStatus") or {}).get("rayClusterName")
    if active != raycluster or pending not in (None, "", raycluster):
        return []
    return list(rayservice["spec"]["rayClusterConfig"].get("workerGroupSpecs") or ())


def read_groups(
    raycluster: Json, pods: Iterable[Json], mirrored: Sequence[Json]
) -> tuple[list[WorkerGroup], list[str]]:
    """The groups that make TPU slices, and why other TPU groups cannot be used.

    Raises:
        UnusableError: the objects are not of the form that KubeRay 1.7 gives them.
    """
    by_group: dict[str, list[Json]] = {}
    groups: list[WorkerGroup] = []
    notes: list[str] = []
    try:
        for pod in pods:
            by_group.setdefault(pod["metadata"]["labels"][GROUP_LABEL], []).append(pod)
        counts = {spec["groupName"]: int(spec["replicas"]) for spec in mirrored}
        for spec in raycluster["spec"].get("workerGroupSpecs") or ():
            kind = _kind_of(spec)
            name = spec["groupName"]
            if isinstance(kind, str):
                notes.append(f"worker group {name} is not used: {kind}")
            elif kind is not None:
                groups.append(_read_group(spec, kind, by_group.get(name, []), counts.get(name)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableError(f"not a RayCluster as KubeRay 1.7 has it: {error!r}") from error
    return groups, notes


def scaling_patch(change: Change, position: int) -> list[dict[str, Any]]:
    """Returns one JSON patch with the new count and one pod of each slice to drop.

    Count and names travel together, or KubeRay would act on half of it. The tests refuse it when
    groups were reordered, or when another writer (Ray's autoscaler, a user) has changed the count
    that the plan started from.
    """
    path = f"/spec/workerGroupSpecs/{position}"
    doomed = [drop.slice.pods[0].name for drop in change.drops]
    return [
        {"op": "test", "path": f"{path}/groupName", "value": change.group.name},
        {"op": "test", "path": f"{path}/replicas", "value": change.group.replicas},
        {"op": "replace", "path": f"{path}/replicas", "value": change.replicas},
        # `add` also replaces; the field is not there before the first deletion.
        {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": doomed}},
    ]


def mirror_patch(change: Change, mirrored: Sequence[Json]) -> list[dict[str, Any]]:
    """Returns a JSON patch that writes the new count into the RayService as well.

    A RayService copies its counts over the cluster's when a group is appended or the operator is
    upgraded; a stale count there would come back.
    """
    position = positions(mirrored)[change.group.name]
    path = f"/spec/rayClusterConfig/workerGroupSpecs/{position}"
    return [
        {"op": "test", "path": f"{path}/groupName", "value": change.group.name},
        {"op": "replace", "path": f"{path}/replicas", "value": change.replicas},
    ]


def positions(specs: Iterable[Json]) -> dict[str, int]:
    """Returns the position of each worker group in its list, by name."""
    return {spec["groupName"]: position for position, spec in enumerate(specs)}


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


def _read_group(
    spec: Json, kind: SliceKind, pods: Sequence[Json], mirrored_replicas: int | None
) -> WorkerGroup:
    # Pods that are being deleted count for nobody any more, Ray's autoscaler included.
    present = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    names = {pod["metadata"]["name"] for pod in present}
    doomed = (spec.get("scaleStrategy") or {}).get("workersToDelete") or ()
    return WorkerGroup(
        name=spec["groupName"],
        kind=kind,
        replicas=int(spec["replicas"]),
        min_replicas=int(spec["minReplicas"]),
        max_replicas=int(spec["maxReplicas"]),
        num_hosts=int(spec.get("numOfHosts", 1)),
        slices=_read_slices(present),
        pods_pending_deletion=frozenset(names) & frozenset(doomed),
        mirrored_replicas=mirrored_replicas,
    )


def _read_slices(pods: Iterable[Json]) -> tuple[ObservedSlice, ...]:
    """Gathers pods into slices, ordered by name, each with its hosts in order."""
    replicas: dict[str, list[Json]] = {}
    for pod in pods:
        name = pod["metadata"]["name"]
        replicas.setdefault(_labels(pod).get(REPLICA_NAME_LABEL, name), []).append(pod)
    slices = [
        ObservedSlice(
            _slice_name(members), tuple(_read_pod(pod) for pod in sorted(members, key=_in_order))
        )
        for members in replicas.values()
    ]
    return tuple(sorted(slices, key=lambda each: (each.name, each.incarnation)))


def _slice_name(members: Sequence[Json]) -> str:
    """Returns one name for each existing slice of a group.

    It is what the webhook puts into `TPU_NAME`, and Ray into its label for the slice, wherever the
    webhook goes by KubeRay's index too.
    """
    pod, labels = members[0], _labels(members[0])
    if index := labels.get(REPLICA_INDEX_LABEL):
        return f"{labels[GROUP_LABEL]}-{index}"
    if len(members) == 1:
        return str(pod["metadata"]["name"])
    return str(labels.get(WEBHOOK_SLICE_LABEL, pod["metadata"]["name"]))


def _read_pod(pod: Json) -> ObservedPod:
    status = pod.get("status") or {}
    phase = status.get("phase", PodPhase.PENDING)
    return ObservedPod(pod["metadata"]["name"], PodPhase(phase), status.get("podIP"))


def _in_order(pod: Json) -> tuple[int, str]:
    return int(_labels(pod).get(HOST_INDEX_LABEL, 0)), pod["metadata"]["name"]


def _labels(pod: Json) -> Mapping[str, str]:
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    return labels
