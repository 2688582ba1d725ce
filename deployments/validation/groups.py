"""Checks that hosts, chips, topology, labels and class of a worker group of slices agree.

The shapes of slices come from `serving.domain.topology`. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deployments.manifests.slice_groups import MAX_GROUP_NAME
from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    ray_clusters,
    sequence,
    texts,
    value_at,
)
from serving.config.slices import MARKET_LABEL
from serving.domain.compute_class import Market
from serving.domain.errors import Problem
from serving.domain.inventory import ACCELERATOR_LABEL, POD_TYPE_LABEL, TOPOLOGY_LABEL
from serving.domain.names.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    NEVER_IDLE_S,
)
from serving.domain.topology import Generation, SliceShape, TopologyError, shapes, slice_shape

# GKE refuses every other rule of a class whose pods tolerate it; a pod of a class needs neither.
# Source: GKE cluster autoscaler at 7d250507, read 2026-11-20.
_NO_TOLERATIONS = ("cloud.google.com/gke-flex-start", "cloud.google.com/gke-spot")


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """The worker group whose pods request chips. `shape` is `None` if no such slice exists."""

    manifest: KubernetesManifest
    path: str
    spec: Json
    shape: SliceShape | None

    @property
    def name(self) -> str:
        """The name of the group."""
        return str(self.spec.get("groupName", ""))

    @property
    def pod(self) -> Json:
        """Returns its pods' spec."""
        return mapping(self.spec, "template", "spec")

    @property
    def selector(self) -> Json:
        """Returns its pods' node selector."""
        return mapping(self.pod, "nodeSelector")

    @property
    def labels(self) -> Json:
        """Returns its hosts' labels in Ray."""
        return mapping(self.spec, "labels")

    def problem(self, field: str, complaint: str, allowed: str, value: object = None) -> Problem:
        """Returns what is wrong with a field of the group."""
        path = f"{self.path}.workerGroupSpecs[{self.name}].{field}"
        return self.manifest.problem(path, complaint, allowed, value)


def slice_groups_in(manifest: KubernetesManifest, path: str, cluster: Json) -> list[FoundGroup]:
    """The groups of a Ray cluster that make slices."""
    return [
        FoundGroup(manifest, path, spec, _shape_of(spec))
        for spec in sequence(cluster, "workerGroupSpecs")
        if isinstance(spec, dict) and _is_of_slices(spec)
    ]


def group_problems(folder: Folder) -> Iterator[Problem]:
    """Yields all problems of groups that need no Serve configuration to find."""
    for manifest, path, cluster in ray_clusters(folder):
        names: set[str] = set()
        for group in slice_groups_in(manifest, path, cluster):
            if group.name in names:
                yield group.problem("groupName", "given twice", "allowed: once each", group.name)
            names.add(group.name)
            yield from _shape_problems(group)
            yield from _name_problems(group, folder)
            yield from _count_problems(group)
            yield from _label_problems(group)
            yield from _toleration_problems(group)


def _is_of_slices(spec: Json) -> bool:
    selector = mapping(spec, "template", "spec", "nodeSelector")
    resources = mapping(spec, "template", "spec", "containers", 0, "resources")
    asks = any(GKE_CHIPS in mapping(resources, kind) for kind in ("limits", "requests"))
    return asks or GKE_ACCELERATOR in selector or GKE_TOPOLOGY in selector


def _shape_of(spec: Json) -> SliceShape | None:
    selector = mapping(spec, "template", "spec", "nodeSelector")
    generation = generations_by_accelerator().get(str(selector.get(GKE_ACCELERATOR)), "")
    chips = value_at(spec, "template", "spec", "containers", 0, "resources", "limits", GKE_CHIPS)
    try:
        return slice_shape(generation, str(selector.get(GKE_TOPOLOGY, "")), int(str(chips)))
    except (TopologyError, ValueError):
        return None


def generations_by_accelerator() -> dict[str, str]:
    """Returns generations by GKE's name for them."""
    return {shapes(generation)[0].gke_accelerator: str(generation) for generation in Generation}


def _shape_problems(group: FoundGroup) -> Iterator[Problem]:
    selector = "template.spec.nodeSelector"
    known = generations_by_accelerator()
    accelerator, topology = group.selector.get(GKE_ACCELERATOR), group.selector.get(GKE_TOPOLOGY)
    if accelerator not in known:
        field = f"{selector}[{GKE_ACCELERATOR}]"
        yield group.problem(field, "no TPU of GKE's", f"allowed: {texts(list(known))}", accelerator)
        return
    resources = mapping(group.pod, "containers", 0, "resources")
    limits, requests = mapping(resources, "limits"), mapping(resources, "requests")
    chips = limits.get(GKE_CHIPS)
    field = "template.spec.containers[0].resources"
    if requests.get(GKE_CHIPS) != chips:
        allowed = f"allowed: the limit, {chips}"
        value = requests.get(GKE_CHIPS)
        yield group.problem(f"{field}.requests[{GKE_CHIPS}]", "not the limit", allowed, value)
    generation = known[str(accelerator)]
    try:
        slice_shape(generation, str(topology))
    except TopologyError as error:
        allowed = f"nearest allowed: {texts(error.choices)}"
        yield group.problem(f"{selector}[{GKE_TOPOLOGY}]", error.complaint, allowed, topology)
        return
    if group.shape is None:
        sizes = [shape.chips_per_host for shape in shapes(generation) if shape.topology == topology]
        complaint = f"not the chips of a host of a {generation} {topology} slice"
        allowed = f"allowed: {texts(sorted(sizes))}"
        yield group.problem(f"{field}.limits[{GKE_CHIPS}]", complaint, allowed, chips)
        return
    num_hosts = group.spec.get("numOfHosts", 1)
    if num_hosts != group.shape.num_hosts:
        complaint = (
            f"a {generation} {topology} slice with {group.shape.chips_per_host} chips per host "
            "has another number of hosts"
        )
        yield group.problem("numOfHosts", complaint, f"allowed: {group.shape.num_hosts}", num_hosts)


def _name_problems(group: FoundGroup, folder: Folder) -> Iterator[Problem]:
    field = f"template.spec.nodeSelector[{GKE_COMPUTE_CLASS}]"
    wanted = group.selector.get(GKE_COMPUTE_CLASS)
    if wanted != group.name:
        complaint = "not the group's name, and each kind of slice has a class of its own"
        yield group.problem(field, complaint, f"allowed: {group.name}", wanted)
    elif wanted not in folder.names("ComputeClass"):
        complaint = "there is no ComputeClass of this name"
        known = sorted(folder.names("ComputeClass"))
        yield group.problem(field, complaint, f"allowed: {texts(known)}", wanted)
    if len(group.name) > MAX_GROUP_NAME:
        complaint = "too long: the slices' names are labels, and begin with it"
        allowed = f"allowed: up to {MAX_GROUP_NAME} characters"
        yield group.problem("groupName", complaint, allowed, group.name)


def _count_problems(group: FoundGroup) -> Iterator[Problem]:
    spec = group.spec
    idle_s = spec.get("idleTimeoutSeconds")
    if not isinstance(idle_s, int) or idle_s < NEVER_IDLE_S:
        complaint = "Ray's autoscaler would take idle slices away, half of one if need be"
        allowed = f"allowed: at least {NEVER_IDLE_S}"
        yield group.problem("idleTimeoutSeconds", complaint, allowed, idle_s)
    least, most = _whole(spec.get("minReplicas")), _whole(spec.get("maxReplicas"))
    replicas = spec.get("replicas")
    if replicas != spec.get("minReplicas"):
        complaint = "not minReplicas, and from there on the slice provisioner sets it"
        yield group.problem("replicas", complaint, f"allowed: {least}", replicas)
    if least is None or most is None or least > most or most < 1:
        value = f"{spec.get('minReplicas')} to {spec.get('maxReplicas')}"
        allowed = "allowed: 0 or more to the same or more, at least 1"
        yield group.problem("maxReplicas", "no bounds for a number of slices", allowed, value)
    if mapping(spec, "scaleStrategy"):
        complaint = "only the slice provisioner names pods to delete"
        yield group.problem("scaleStrategy", complaint, "allowed: nothing", "workersToDelete")
    if "labels" in mapping(spec, "rayStartParams"):
        complaint = "KubeRay refuses labels here"
        yield group.problem("rayStartParams.labels", complaint, "allowed: in labels", "labels")


def _label_problems(group: FoundGroup) -> Iterator[Problem]:
    if group.shape is not None:
        expected = {
            POD_TYPE_LABEL: group.shape.ray_pod_type,
            TOPOLOGY_LABEL: group.shape.topology,
            ACCELERATOR_LABEL: group.shape.ray_accelerator_type,
        }
        for name, value in expected.items():
            if group.labels.get(name) != value:
                complaint = "not what Ray finds on these hosts"
                given = group.labels.get(name)
                yield group.problem(f"labels[{name}]", complaint, f"allowed: {value}", given)
    market = group.labels.get(MARKET_LABEL)
    if market not in tuple(Market):
        allowed = f"allowed: {texts(tuple(Market))}"
        yield group.problem(f"labels[{MARKET_LABEL}]", "no market", allowed, market)
    if not group.labels.get(COMPUTE_CLASS_LABEL):
        field = f"labels[{COMPUTE_CLASS_LABEL}]"
        allowed = "required: the class as the deployments call it"
        yield group.problem(field, "missing: the slice provisioner goes by it", allowed)


def _toleration_problems(group: FoundGroup) -> Iterator[Problem]:
    tolerations = [entry for entry in sequence(group.pod, "tolerations") if isinstance(entry, dict)]
    field = "template.spec.tolerations"
    # The taint of every TPU node, and that of the nodes of a class.
    for key, value in ((GKE_CHIPS, "present"), (GKE_COMPUTE_CLASS, group.name)):
        if not any(_tolerates(toleration, key, value) for toleration in tolerations):
            complaint = f"does not tolerate the taint {key}={value}:NoSchedule of its nodes"
            required = f"required: a toleration of {key}"
            found = texts([toleration.get("key") for toleration in tolerations])
            yield group.problem(field, complaint, required, found)
    for toleration in tolerations:
        if toleration.get("key") in _NO_TOLERATIONS:
            complaint = "nodes of a class have no such taint, and GKE may refuse the class for it"
            yield group.problem(field, complaint, "allowed: without it", toleration.get("key"))


def _tolerates(toleration: Json, key: str, value: str) -> bool:
    if toleration.get("key") not in (None, key):
        return False
    if toleration.get("effect") not in (None, "NoSchedule"):
        return False
    exists = toleration.get("operator", "Equal") == "Exists"
    return exists or toleration.get("value") == value


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_whole else None
