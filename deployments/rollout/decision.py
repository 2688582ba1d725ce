"""Decides what applying a RayService or RayCluster does to the one that runs. Pure.

Owns the order of gravity, from nothing to what would not take effect, and the way that works
within the chips there are. What goes over in place is the slice provisioner's own decision
(`autoscaling.provisioning.carry`), asked here before anything is applied. Objects are as the API
server has them, or would have them: a dry run tells.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import yaml

from autoscaling.provisioning.carry.compare import (
    CLUSTER,
    HEAD,
    Carry,
    Effect,
    Hindrance,
    compare_clusters,
    outdated_pods,
)
from autoscaling.provisioning.objects.json_differences import differences, summary
from deployments.applied import RunningCluster
from deployments.manifests.names import CONTROL_GROUP, GATEWAY_GROUP
from deployments.rollout.chips import ChipNeed, chip_need

SERVE_CONFIG = "Serve configuration"
# The slices of a group that are away at once while they are replaced.
SLICES_AT_ONCE = 1
_GROUP_LABEL = "ray.io/group"
_IN_PLACE = "set cluster.upgrade.kind: in_place, render and apply"
_NOT_PROMOTED = (
    "this cluster has not run the whole application yet, because a first replica still waits: what "
    "KubeRay does then with a changed cluster was never tried, and it may make another one"
)
_MORE_CHIPS = (
    "get the chips and raise the quota (cluster.upgrade.kind: new_cluster renders one for two "
    "clusters), or stop what runs: delete the RayService and apply"
)

Json = Mapping[str, Any]


class Outcome(IntEnum):
    """What applying amounts to, by rising gravity; the number is the command's exit status."""

    NOTHING = 0
    FIRST_INSTALLATION = 3
    IN_PLACE = 4
    ROLLS = 5  # pods that run are of an older template, and are replaced
    SECOND_CLUSTER = 6
    NOT_AS_APPLIED = 7  # part of it would not take effect, or would be refused


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """One thing that applying does: to what, what differs, and when or how it takes effect."""

    subject: str
    what: str
    effect: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """What applying would do. `chips` is `None` where no second cluster is in question."""

    outcome: Outcome
    steps: tuple[RolloutStep, ...] = ()
    hindrances: tuple[Hindrance, ...] = ()
    chips: ChipNeed | None = None
    notes: tuple[str, ...] = ()


def decide_rollout(wanted: Json, running: RunningCluster, num_allowed: int | None) -> Rollout:
    """Returns what applying `wanted` does. `num_allowed` are the quota's chips, `None` without."""
    if running.cluster is None:
        return Rollout(Outcome.FIRST_INSTALLATION)
    if wanted["kind"] == "RayCluster":
        rollout = _carried(wanted["spec"], running.cluster, running.pods)
        return replace(rollout, notes=(*rollout.notes, *_fallen_counts(wanted, running.cluster)))
    spec = wanted["spec"]
    strategy = (spec.get("upgradeStrategy") or {}).get("type") or "NewCluster"
    rollout = _of_service(spec["rayClusterConfig"], running, strategy, num_allowed)
    if not running.is_promoted and rollout.outcome != Outcome.NOTHING:
        rollout = replace(rollout, notes=(*rollout.notes, _NOT_PROMOTED))
    serve = _serve_steps(running.service, spec)
    outcome = max(rollout.outcome, Outcome.IN_PLACE) if serve else rollout.outcome
    return replace(rollout, outcome=outcome, steps=(*serve, *rollout.steps))


def _of_service(
    wanted: Json, running: RunningCluster, strategy: str, num_allowed: int | None
) -> Rollout:
    assert running.cluster is not None
    if running.other_cluster is not None:
        reason = f"KubeRay is making or removing a second cluster, {running.other_cluster}"
        hindrance = Hindrance(CLUSTER, "every change", reason, "wait until there is one cluster")
        return Rollout(Outcome.NOT_AS_APPLIED, (), (hindrance,))
    if strategy == "None":
        rollout = _carried(wanted, running.cluster, running.pods)
        if not rollout.hindrances:
            return rollout
        return replace(rollout, chips=chip_need(wanted, running.pods, num_allowed))
    return _second_cluster(wanted, running, num_allowed)


def _carried(wanted: Json, cluster: Json, pods: Sequence[Json]) -> Rollout:
    """Returns what the running cluster takes in place, and what of it is then replaced."""
    carry = compare_clusters(wanted, cluster, pods)
    older: dict[str, list[str]] = {}
    for change in carry.changes:
        if change.effect == Effect.NEW_PODS:
            older.setdefault(change.subject, []).append(change.what)
    for subject, names in outdated_pods(cluster, pods).items():
        lines = older.setdefault(subject, [])
        lines.append(f"{len(names)} pods that run are of an older template already")
    slices = _num_slices(cluster, pods)
    at_once = [
        RolloutStep(change.subject, change.what, "at once")
        for change in carry.changes
        if change.effect == Effect.AT_ONCE
    ]
    rolls = [
        RolloutStep(subject, "; ".join(lines), _way_of_pods(subject, slices, pods))
        for subject, lines in older.items()
    ]
    outcome = Outcome.IN_PLACE if at_once else Outcome.NOTHING
    outcome = Outcome.ROLLS if rolls else outcome
    outcome = Outcome.NOT_AS_APPLIED if carry.hindrances else outcome
    return Rollout(outcome, (*at_once, *rolls), carry.hindrances)


def _second_cluster(wanted: Json, running: RunningCluster, num_allowed: int | None) -> Rollout:
    """Returns what KubeRay does where it makes a second cluster for what it sees as a change."""
    assert running.cluster is not None
    live = running.cluster["spec"]
    carry = compare_clusters(wanted, running.cluster, running.pods)
    causes = [one.what for one in carry.changes if one.effect == Effect.NEW_PODS]
    causes += [one.what for one in carry.hindrances]
    if not causes and _templates(wanted, live) != _templates(live, wanted):
        causes = ["templates were carried in place before, which KubeRay takes for a change"]
    if not causes:
        return _left_out(carry, live)
    need = chip_need(wanted, running.pods, num_allowed)
    step = RolloutStep(CLUSTER, summary(causes), "a second cluster, then the first one goes")
    if not need.num_refused:
        return Rollout(Outcome.SECOND_CLUSTER, (step,), (), need)
    way = _IN_PLACE if not carry.hindrances else _MORE_CHIPS
    hindrance = Hindrance(CLUSTER, "a second cluster", f"{need}", way)
    return Rollout(Outcome.NOT_AS_APPLIED, (step,), (hindrance,), need)


def _left_out(carry: Carry, live: Json) -> Rollout:
    """Returns what becomes of bounds and new groups where KubeRay makes no second cluster."""
    known = {group["groupName"] for group in live.get("workerGroupSpecs") or ()}
    added = tuple(
        RolloutStep(one.subject, one.what, "at once: KubeRay appends it")
        for one in carry.changes
        if one.subject not in known
    )
    reason = "KubeRay leaves bounds out of what it compares: they reach no cluster that runs"
    hindrances = tuple(
        Hindrance(one.subject, one.what, reason, _IN_PLACE)
        for one in carry.changes
        if one.subject in known
    )
    outcome = Outcome.IN_PLACE if added else Outcome.NOTHING
    return Rollout(Outcome.NOT_AS_APPLIED if hindrances else outcome, added, hindrances)


def _templates(spec: Json, other: Json) -> dict[str, object]:
    """Returns the templates of those groups that both clusters have, and the head's."""
    common = {group["groupName"] for group in other.get("workerGroupSpecs") or ()}
    groups = spec.get("workerGroupSpecs") or ()
    templates = {one["groupName"]: one["template"] for one in groups if one["groupName"] in common}
    return templates | {HEAD: spec["headGroupSpec"]["template"]}


def _serve_steps(service: Json | None, spec: Json) -> tuple[RolloutStep, ...]:
    before = {} if service is None else service["spec"]
    old, new = (yaml.safe_load(one.get("serveConfigV2") or "") for one in (before, spec))
    if service is None or not (lines := differences(old, new)):
        return ()
    return (RolloutStep(SERVE_CONFIG, summary(lines), "in place, by Ray Serve"),)


def _fallen_counts(wanted: Json, cluster: Json) -> list[str]:
    """Returns a note for each count of a RayCluster that kubectl writes the file's over."""
    live = {group["groupName"]: group for group in cluster["spec"].get("workerGroupSpecs") or ()}
    return [
        f"{name}: kubectl writes the count {group.get('replicas')} over {live[name]['replicas']}; "
        "no pod goes, and the slice provisioner sets it again at its next look"
        for group in wanted["spec"].get("workerGroupSpecs") or ()
        if (name := group["groupName"]) in live and group.get("replicas") != live[name]["replicas"]
    ]


def _num_slices(cluster: Json, pods: Sequence[Json]) -> dict[str, int]:
    """Returns the slices that there are, by worker group; half a slice counts as one."""
    num_pods = Counter(pod["metadata"]["labels"].get(_GROUP_LABEL) for pod in pods)
    return {
        group["groupName"]: -(-num_pods[group["groupName"]] // int(group.get("numOfHosts") or 1))
        for group in cluster["spec"].get("workerGroupSpecs") or ()
    }


def _way_of_pods(subject: str, slices: Mapping[str, int], pods: Sequence[Json]) -> str:
    """Says how pods that run come to what was applied."""
    if subject == HEAD:
        names = _names(pods, "headgroup")
        return f"with the next head, which costs no request: kubectl delete pod {names}"
    if subject == GATEWAY_GROUP:
        names = _names(pods, GATEWAY_GROUP)
        return f"with the next gateways: kubectl delete pod, one at a time: {names}"
    if subject == CONTROL_GROUP:
        names = _names(pods, CONTROL_GROUP)
        return f"with the next control pods: kubectl delete pod, one at a time: {names}"
    if not (num_slices := slices.get(subject, 0)):
        return "in slices made from now on; there is none"
    plural = "slice" if num_slices == 1 else "slices"
    return f"slice by slice: {num_slices} {plural}, {SLICES_AT_ONCE} at a time"


def _names(pods: Sequence[Json], group: str) -> str:
    names = [
        pod["metadata"]["name"]
        for pod in pods
        if pod["metadata"]["labels"].get(_GROUP_LABEL) == group
    ]
    return ", ".join(sorted(names)) or "there is none"
