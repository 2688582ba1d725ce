"""Compares a RayService with its RayCluster: what is to be carried over, and what cannot be. Pure.

Under `upgradeStrategy: None` KubeRay leaves the cluster as it was made, whatever is applied to the
RayService later; only a group that is appended before anything else changed comes over (recorded
from KubeRay 1.7.0 on 2026-11-22). A new RayCluster's spec is the RayService's, field by field, but
for `scaleStrategy: {}`, so the two can be compared as they are read.

Counts (`replicas`, `scaleStrategy`) are nobody's here: the plan has them. KubeRay makes pods from
what stands in the RayCluster and changes no pod that runs, so a changed template is carried at
once, and which pods are of an older one is told by an annotation of ours.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autoscaling.provisioning.objects.json_differences import differences, summary
from serving.domain.names.gke_names import (
    POD_FIELDS,
    hash_of_template,
    with_template_hash,
    without_template_hash,
)

HEAD, CLUSTER = "head", "cluster"
# KubeRay's labels, and the group that it gives the head's pod. Source: recorded from KubeRay 1.7.0.
_GROUP_LABEL, _HEAD_GROUP = "ray.io/group", "headgroup"
_GROUPS = "/spec/workerGroupSpecs"
_COUNTS = frozenset({"replicas", "scaleStrategy"})
# What KubeRay and Ray's autoscaler read anew at each look.
_BOUNDS = ("minReplicas", "maxReplicas", "idleTimeoutSeconds", "priority")

Json = Mapping[str, Any]
Step = dict[str, Any]

NEW_CLUSTER = (
    "a second cluster (cluster.upgrade.kind: new_cluster), which needs its slices beside those of "
    "this one"
)
_NEW_GROUP = "a group of another name: another compute class for the deployment, or another shape"
# Fields that are refused, with the reason and the way that works.
_REFUSED_OF_GROUP = {
    "numOfHosts": ("a group's slices would be of two sizes under one name", _NEW_GROUP),
    "suspend": ("KubeRay would end every slice of the group at once", "max_slices of its class"),
}
_REFUSED = {
    "authOptions": ("pods with and without the token would not reach each other", NEW_CLUSTER),
    "enableInTreeAutoscaling": (
        "without the autoscaler KubeRay drops surplus slices at random",
        "leave it on",
    ),
    "gcsFaultToleranceOptions": (
        "the next head would begin with another state, or with none",
        NEW_CLUSTER,
    ),
    "managedBy": ("KubeRay refuses to change it", NEW_CLUSTER),
    "rayVersion": ("Ray refuses nodes of another version, to the patch", NEW_CLUSTER),
    "suspend": ("KubeRay would end every pod at once", "delete the RayService instead"),
    "upgradeStrategy": (
        "with Recreate KubeRay ends every pod whenever a template changes",
        "leave it out",
    ),
}
_UNTRIED = "what KubeRay does with it in a running cluster was never tried"


class Effect(StrEnum):
    """When a change that is carried over takes effect."""

    AT_ONCE = "at once"
    NEW_PODS = "in pods made from now on"  # those that run are of an older template


@dataclass(frozen=True, slots=True)
class CarriedChange:
    """One change that the cluster takes in place.

    `subject` is a worker group's name, `HEAD` or `CLUSTER`; `what` says what differs.
    """

    subject: str
    effect: Effect
    what: str


@dataclass(frozen=True, slots=True)
class Hindrance:
    """One difference that is not carried over: why, and the way that works."""

    subject: str
    what: str
    reason: str
    way: str


@dataclass(frozen=True, slots=True)
class Carry:
    """What a RayService has that its RayCluster has not.

    `patch` is a JSON patch of the RayCluster, empty if there is nothing to change. It is refused if
    the cluster's spec has changed since it was read.
    """

    changes: tuple[CarriedChange, ...] = ()
    hindrances: tuple[Hindrance, ...] = ()
    patch: tuple[Step, ...] = ()


def carry_over(rayservice: Json, raycluster: Json, pods: Iterable[Json]) -> Carry:
    """Returns what is to be carried from a RayService into its RayCluster now.

    `pods` are the cluster's. While the RayService makes another cluster, or is told to make one for
    each change, nothing is carried, and the only hindrance says so.
    """
    name = raycluster["metadata"]["name"]
    if (reason := _not_now(rayservice, name)) is not None:
        return Carry(hindrances=(Hindrance(CLUSTER, "everything", reason, "wait for KubeRay"),))
    return compare_clusters(rayservice["spec"]["rayClusterConfig"], raycluster, pods)


def compare_clusters(wanted: Json, raycluster: Json, pods: Iterable[Json]) -> Carry:
    """Returns what `wanted`, the spec of a RayCluster, has that a running one has not.

    Both have the defaults of KubeRay's schema in them, as the API server returns objects. Where
    something of the cluster as a whole cannot be carried over, no pod is made of a new template
    either: its image may be of another Ray.
    """
    live = raycluster["spec"]
    occupied = frozenset(pod["metadata"]["labels"].get(_GROUP_LABEL) for pod in pods)
    refused = _refused_of_all(wanted, live)
    parts = [
        *_compare_groups(_groups(wanted), _groups(live), occupied, has_new_pods=not refused),
        _compare_head(wanted, live, has_new_pods=not refused),
        Carry(hindrances=refused),
    ]
    steps = [step for part in parts for step in part.patch]
    generation = raycluster["metadata"].get("generation")
    lock: Step = {"op": "test", "path": "/metadata/generation", "value": generation}
    return Carry(
        tuple(change for part in parts for change in part.changes),
        tuple(hindrance for part in parts for hindrance in part.hindrances),
        (lock, *steps) if steps else (),
    )


def outdated_pods(raycluster: Json, pods: Iterable[Json]) -> dict[str, tuple[str, ...]]:
    """Returns the pods made from an older template, by worker group; the head's under `HEAD`.

    A pod without the annotation is outdated once its group's template has one. Pods that are being
    deleted, and pods of groups that are gone, are left out. A head whose autoscaler alone was
    changed is not among them: `autoscalerOptions` is no part of its template.
    """
    spec = raycluster["spec"]
    wanted = {group["groupName"]: hash_of_template(group["template"]) for group in _groups(spec)}
    wanted[_HEAD_GROUP] = hash_of_template(spec["headGroupSpec"]["template"])
    found: dict[str, list[str]] = {}
    for pod in pods:
        metadata = pod["metadata"]
        group = metadata["labels"].get(_GROUP_LABEL)
        if group not in wanted or metadata.get("deletionTimestamp"):
            continue
        if hash_of_template(pod) != wanted[group]:
            name = HEAD if group == _HEAD_GROUP else group
            found.setdefault(name, []).append(metadata["name"])
    return {name: tuple(sorted(names)) for name, names in found.items()}


def _not_now(rayservice: Json, raycluster: str) -> str | None:
    strategy = (rayservice["spec"].get("upgradeStrategy") or {}).get("type")
    if strategy != "None":
        return f"upgradeStrategy is {strategy or 'NewCluster'}: KubeRay makes a second cluster"
    status = rayservice.get("status") or {}
    active = (status.get("activeServiceStatus") or {}).get("rayClusterName")
    pending = (status.get("pendingServiceStatus") or {}).get("rayClusterName")
    if raycluster not in (active, pending) or {active, pending} - {raycluster, None, ""}:
        return f"the RayService has cluster {active or 'none'}, and {pending or 'none'} to come"
    return None


def _compare_groups(
    wanted: Sequence[Json],
    live: Sequence[Json],
    occupied: Container[str | None],
    *,
    has_new_pods: bool,
) -> list[Carry]:
    """Returns a comparison for each group; removals come last, the highest position first."""
    positions = {group["groupName"]: position for position, group in enumerate(live)}
    compared = []
    for group in wanted:
        position = positions.get(group["groupName"])
        if position is None:
            compared.append(_added(group, has_new_pods=has_new_pods))
        else:
            compared.append(
                _compare_group(group, live[position], position, has_new_pods=has_new_pods)
            )
    kept = {group["groupName"] for group in wanted}
    removed = [
        _removed(group, position, is_occupied=group["groupName"] in occupied)
        for position, group in reversed(list(enumerate(live)))
        if group["groupName"] not in kept
    ]
    return [*compared, *removed]


def _compare_group(wanted: Json, live: Json, position: int, *, has_new_pods: bool) -> Carry:
    name, path = wanted["groupName"], f"{_GROUPS}/{position}"
    known = {*_BOUNDS, *_COUNTS, *POD_FIELDS, "template", "groupName"}
    hindrances = _refusals(wanted, live, name, known, _REFUSED_OF_GROUP)
    bounds = _changed_fields(wanted, live, path, name, _BOUNDS, Effect.AT_ONCE)
    pods = _changed_pods(wanted, live, path, name)
    if hindrances or not has_new_pods:
        pods = _with_the_rest(pods)
    steps = (*bounds.patch, *pods.patch)
    mine = {"op": "test", "path": f"{path}/groupName", "value": name}
    return Carry(
        (*bounds.changes, *pods.changes),
        (*hindrances, *pods.hindrances),
        (mine, *steps) if steps else (),
    )


def _compare_head(wanted: Json, live: Json, *, has_new_pods: bool) -> Carry:
    pods = _changed_pods(
        wanted["headGroupSpec"], live["headGroupSpec"], "/spec/headGroupSpec", HEAD
    )
    # Ray's autoscaler runs in the head's pod.
    beside = _changed_fields(wanted, live, "/spec", HEAD, ("autoscalerOptions",), Effect.NEW_PODS)
    both = Carry((*pods.changes, *beside.changes), (), (*pods.patch, *beside.patch))
    return both if has_new_pods else _with_the_rest(both)


def _refused_of_all(wanted: Json, live: Json) -> tuple[Hindrance, ...]:
    """Returns what cannot be carried over of the head and of the cluster as a whole."""
    heads = wanted["headGroupSpec"], live["headGroupSpec"]
    known = {"autoscalerOptions", "headGroupSpec", "workerGroupSpecs"}
    return (
        *_refusals(*heads, HEAD, {*POD_FIELDS, "template"}, {}),
        *_refusals(wanted, live, CLUSTER, known, _REFUSED),
    )


def _with_the_rest(pods: Carry) -> Carry:
    """Holds back what pods are made from."""
    reason = "it may go with what cannot be carried over"
    return Carry(
        hindrances=tuple(
            Hindrance(change.subject, change.what, reason, NEW_CLUSTER) for change in pods.changes
        )
    )


def _added(group: Json, *, has_new_pods: bool) -> Carry:
    # As it is first made; from then on the provisioner counts.
    made = {key: value for key, value in group.items() if key not in _COUNTS}
    made["replicas"] = group.get("minReplicas", 0)
    what = f"the group is new: {made['replicas']} to {group.get('maxReplicas')} slices"
    change = CarriedChange(group["groupName"], Effect.AT_ONCE, what)
    added = Carry((change,), (), ({"op": "add", "path": f"{_GROUPS}/-", "value": made},))
    return added if has_new_pods else _with_the_rest(added)


def _removed(group: Json, position: int, *, is_occupied: bool) -> Carry:
    """Removes a group that has nothing left, and lets any other one run empty."""
    name, path = group["groupName"], f"{_GROUPS}/{position}"
    mine = {"op": "test", "path": f"{path}/groupName", "value": name}
    if not is_occupied and not group.get("replicas"):
        change = CarriedChange(name, Effect.AT_ONCE, "the group is gone, and nothing was in it")
        return Carry((change,), (), (mine, {"op": "remove", "path": path}))
    reason = "it has slices, which KubeRay would end at once and replicas may be on"
    way = "take its class out of the models' deployments: its slices go when nobody has them"
    hindrance = Hindrance(name, "the group is gone", reason, way)
    if not group.get("minReplicas"):
        return Carry(hindrances=(hindrance,))
    what = f"minReplicas: {group['minReplicas']} to 0, so that the group can run empty"
    step = {"op": "replace", "path": f"{path}/minReplicas", "value": 0}
    return Carry((CarriedChange(name, Effect.AT_ONCE, what),), (hindrance,), (mine, step))


def _changed_fields(
    wanted: Json, live: Json, path: str, subject: str, names: Iterable[str], effect: Effect
) -> Carry:
    changes: list[CarriedChange] = []
    steps: list[Step] = []
    for name in names:
        if not (lines := differences(live.get(name), wanted.get(name), name)):
            continue
        changes.append(CarriedChange(subject, effect, summary(lines)))
        if name in wanted:
            # `add` also replaces.
            steps.append({"op": "add", "path": f"{path}/{name}", "value": wanted[name]})
        else:
            steps.append({"op": "remove", "path": f"{path}/{name}"})
    return Carry(tuple(changes), (), tuple(steps))


def _changed_pods(wanted: Json, live: Json, path: str, subject: str) -> Carry:
    """Carries over what pods are made from; the template then has the hash of all of it."""
    beside = _changed_fields(wanted, live, path, subject, POD_FIELDS, Effect.NEW_PODS)
    new, old = without_template_hash(wanted["template"]), without_template_hash(live["template"])
    changes = list(beside.changes)
    if lines := differences(old, new, "template"):
        changes.append(CarriedChange(subject, Effect.NEW_PODS, summary(lines)))
    if not changes:
        return Carry()
    # Not the hash that was rendered: an overlay may have changed the template since.
    stamped = with_template_hash(wanted)
    step = {"op": "replace", "path": f"{path}/template", "value": stamped}
    return Carry(tuple(changes), (), (*beside.patch, step))


def _refusals(
    wanted: Json,
    live: Json,
    subject: str,
    known: Iterable[str],
    reasons: Mapping[str, tuple[str, str]],
) -> tuple[Hindrance, ...]:
    names = sorted((wanted.keys() | live.keys()) - set(known))
    return tuple(
        Hindrance(subject, summary(lines), *reasons.get(name, (_UNTRIED, NEW_CLUSTER)))
        for name in names
        if (lines := differences(live.get(name), wanted.get(name), name))
    )


def _groups(spec: Json) -> Sequence[Json]:
    groups: Sequence[Json] = spec.get("workerGroupSpecs") or ()
    return groups
