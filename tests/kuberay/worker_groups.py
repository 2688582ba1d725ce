"""Which pods of a worker group KubeRay deletes and makes at one look. Pure.

The rules are those of KubeRay 1.7.0, as the team read them (`reference/gke-kuberay.md`, section 6)
and saw them done (`tests/data/kuberay/recorded`). They differ by the number of hosts: slices of
several hosts go and come whole, and a pod that is being deleted counts no more; a slice of one host
counts until its pod is gone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoscaling.provisioning.raycluster import REPLICA_INDEX_LABEL, REPLICA_NAME_LABEL
from serving.domain.names.gke_names import HOST_INDEX_LABEL

Json = dict[str, Any]

_ENDED = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class Deletion:
    """A pod that goes, and why: what the operator's event says of it."""

    pod: Json
    reason: str


@dataclass(slots=True)
class Step:
    """What one look at a group comes to, in this order.

    `indexes` are those of slices to make. `looks_again` says that the rest of the cluster has to
    wait for another look, as after an error.
    """

    deletions: list[Deletion] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    looks_again: bool = False


def wanted_slices(group: Json) -> int:
    """How many slices a group is to have: its count within its bounds, which nobody is told."""
    count = group.get("replicas") or 0
    return max(group.get("minReplicas") or 0, min(count, group["maxReplicas"]))


def look(group: Json, pods: Sequence[Json], *, has_autoscaler: bool, dice: random.Random) -> Step:
    """One look at a group whose pods are `pods`. `dice` choose where nobody has named a pod."""
    if group.get("numOfHosts", 1) > 1:
        return _look_at_slices(group, pods, has_autoscaler, dice)
    return _look_at_hosts(group, pods, has_autoscaler, dice)


def _look_at_hosts(
    group: Json, pods: Sequence[Json], has_autoscaler: bool, dice: random.Random
) -> Step:
    ended = [pod for pod in pods if pod["status"].get("phase") in _ENDED]
    if ended:
        return Step(
            [Deletion(pod, _end_of(pod)) for pod in ended if not _is_going(pod)], looks_again=True
        )
    named = _named(group)
    step = Step(
        [
            Deletion(pod, "it is named")
            for pod in pods
            if pod["metadata"]["name"] in named and not _is_going(pod)
        ]
    )
    staying = [pod for pod in pods if pod["metadata"]["name"] not in named]
    missing = wanted_slices(group) - len(staying)
    step.indexes = _lowest_free([_index(pod) for pod in staying], missing)
    if missing < 0 and not has_autoscaler:
        surplus = dice.sample(staying, -missing)
        step.deletions += [Deletion(pod, "it is one too many") for pod in surplus]
    return step


def _look_at_slices(
    group: Json, pods: Sequence[Json], has_autoscaler: bool, dice: random.Random
) -> Step:
    slices: dict[str, list[Json]] = {}
    for pod in sorted(pods, key=_host):
        if not _is_going(pod):
            slices.setdefault(pod["metadata"]["labels"][REPLICA_NAME_LABEL], []).append(pod)
    for members in slices.values():
        if len(members) < group["numOfHosts"]:
            reason = "its slice is incomplete"
            return Step([Deletion(pod, reason) for pod in members], looks_again=True)
    step = Step()
    for name, members in list(slices.items()):
        ended = [pod for pod in members if pod["status"].get("phase") in _ENDED]
        if ended:
            step.deletions += [Deletion(pod, _end_of(ended[0])) for pod in members]
            del slices[name]
    named = _named(group)
    for members in slices.values():
        if any(pod["metadata"]["name"] in named for pod in members):
            step.deletions += [Deletion(pod, "its slice is named") for pod in members]
            step.looks_again = True
    if step.looks_again:
        return step
    missing = wanted_slices(group) - len(slices)
    step.indexes = _lowest_free([_index(members[0]) for members in slices.values()], missing)
    if missing < 0 and not has_autoscaler:
        for name in dice.sample(sorted(slices), -missing):
            step.deletions += [Deletion(pod, "its slice is one too many") for pod in slices[name]]
    return step


def _lowest_free(used: Sequence[int], count: int) -> list[int]:
    """The indexes that new slices get."""
    taken, found = set(used), []
    for _ in range(count):
        index = min(set(range(len(taken) + 1)) - taken)
        taken.add(index)
        found.append(index)
    return found


def _named(group: Json) -> set[str]:
    return set(group.get("scaleStrategy", {}).get("workersToDelete") or ())


def _is_going(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _index(pod: Json) -> int:
    return int(pod["metadata"]["labels"][REPLICA_INDEX_LABEL])


def _host(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get(HOST_INDEX_LABEL, 0))


def _end_of(pod: Json) -> str:
    return f"{pod['metadata']['name']} has ended: {pod['status']['phase']}"
