"""What two runs of the same thing may differ in, one rule each with its reason. Pure.

The conformance tests compare what the emulation made of a scenario with what the real programs
made of it. Both are made comparable by the rules below, and by nothing else. Where the emulation
still differs, `differences.py` says so by name.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.kubelet import HELD

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
)
from serving.domain.names.gke_names import HOST_INDEX_LABEL

Json = dict[str, Any]
Snapshot = dict[str, list[Json]]
Picture = dict[str, Json]

_CONTROLLERS = ("raycluster-controller", "rayservice-controller")
_LETTERS = "[bcdfghjklmnpqrstvwxz2456789]{5}"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MADE_UP = re.compile(rf"(-worker-|-head-|kube-api-access-){_LETTERS}")
_PLACE = re.compile(r"serving/[^\s,;:]+")
_HASHES = (
    "ray.io/hash-without-replicas-and-workers-to-delete",
    "ray.io/upgrade-strategy-recreate-hash",
)


@dataclass(frozen=True)
class Rule:
    """One thing that is left out or replaced in objects of `kinds`; empty for all."""

    kinds: tuple[str, ...]
    what: str
    reason: str
    apply: Callable[[Json], None]


def pictures(snapshots: Sequence[Snapshot], namespace: str) -> list[Picture]:
    """The moments of one scenario, each with its objects by a name that both runs have."""
    names = _names(snapshots)
    hashes: dict[str, str] = {}
    return [_picture(each, namespace, names, hashes) for each in snapshots]


def _picture(
    snapshot: Snapshot, namespace: str, names: dict[str, str], hashes: dict[str, str]
) -> Picture:
    ours = {
        kind: [each for each in found if _is_compared(kind, each)]
        for kind, found in snapshot.items()
    }
    picture: Picture = {}
    for kind, found in ours.items():
        bodies = [_normal(kind, each, namespace, names, hashes) for each in found]
        for key, body in sorted(
            ((_key(kind, body), body) for body in bodies),
            key=lambda each: (each[0], json.dumps(each[1], sort_keys=True)),
        ):
            _put(picture, f"{kind}/{key}", body)
    return picture


def _put(picture: Picture, key: str, body: Json) -> None:
    """Events that say the same become one: how often depends on the pace of retries."""
    number, name = 2, key
    while name in picture:
        if picture[name] == body:
            return
        name, number = f"{key} ({number})", number + 1
    picture[name] = body


def _is_compared(kind: str, body: Json) -> bool:
    """What the two programs made, and what Kubernetes made of that.

    Redis, accounts and rights that our manifests bring are nobody's doing but ours.
    """
    if kind == "events":
        return body.get("reportingComponent") in _CONTROLLERS
    if kind in ("rayclusters", "rayservices"):
        return True
    if kind == "endpointslices":
        labels = body["metadata"]["labels"]
        return any(name.startswith("ray.io/") for name in labels)
    owners = body["metadata"].get("ownerReferences", ())
    return any(owner["kind"] in ("RayCluster", "RayService") for owner in owners)


def _normal(
    kind: str, body: Json, namespace: str, names: dict[str, str], hashes: dict[str, str]
) -> Json:
    text = json.dumps(body)
    for name, token in names.items():
        text = text.replace(name, token)
    text = re.sub(rf"\b{namespace}\b", "serving", text)
    text = _MADE_UP.sub(r"\1*", _UUID.sub("<uid>", text))
    found: Json = json.loads(text)
    annotations = found["metadata"].get("annotations", {})
    for name in _HASHES:
        if name in annotations:
            token = f"<hash {len(hashes) + 1}>"
            annotations[name] = hashes.setdefault(annotations[name], token)
    for rule in RULES:
        if not rule.kinds or kind in rule.kinds:
            rule.apply(found)
    return found


def _key(kind: str, body: Json) -> str:
    if kind == "events":
        involved = body["involvedObject"]
        return f"{involved['kind']}/{involved['name']}/{body['reason']}"
    name: str = body["metadata"]["name"]
    return name


def _names(snapshots: Sequence[Snapshot]) -> dict[str, str]:
    """Made-up names, and what they stand for in both runs; the longest first.

    Clusters are numbered as they came. A pod is told by its cluster, group, slice and host, and by
    how many of these there were before it, as far as the moments show.
    """
    found: dict[str, str] = {}
    clusters = _by_age(snapshots, "rayclusters")
    for number, cluster in enumerate(clusters, start=1):
        name = cluster["metadata"]["name"]
        for owner in cluster["metadata"].get("ownerReferences", ()):
            found[name] = f"{owner['name']}-~{number}"
    seen: dict[str, int] = {}
    for pod in _by_age(snapshots, "pods"):
        labels = pod["metadata"].get("labels", {})
        if CLUSTER_LABEL not in labels:
            continue
        cluster = found.get(labels[CLUSTER_LABEL], labels[CLUSTER_LABEL])
        index = labels.get(REPLICA_INDEX_LABEL, "0")
        host = labels.get(HOST_INDEX_LABEL, "0")
        place = f"{cluster}/{labels[GROUP_LABEL]}/{index}/{host}"
        seen[place] = seen.get(place, 0) + 1
        token = f"{place}#{seen[place]}".replace("/", ".")
        found[pod["metadata"]["name"]] = token
        if REPLICA_NAME_LABEL in labels:
            replica = f"<slice {labels[GROUP_LABEL]}-{index}#{seen[place]}>"
            found.setdefault(labels[REPLICA_NAME_LABEL], replica)
        if "podIP" in pod.get("status", {}):
            found[f'"{pod["status"]["podIP"]}"'] = f'"<address of {token}>"'
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def _by_age(snapshots: Sequence[Snapshot], kind: str) -> Iterable[Json]:
    """Every object that any moment shows, once, those that came first before."""
    found: dict[str, Json] = {}
    for snapshot in snapshots:
        for body in snapshot[kind]:
            found[body["metadata"]["name"]] = body
    return sorted(found.values(), key=lambda each: str(each["metadata"]["creationTimestamp"]))


# -- the rules --


def _drop(*path: str) -> Callable[[Json], None]:
    def apply(body: Json) -> None:
        for part in path[:-1]:
            body = body.get(part) or {}
        body.pop(path[-1], None)

    return apply


def _all(*steps: Callable[[Json], None]) -> Callable[[Json], None]:
    def apply(body: Json) -> None:
        for step in steps:
            step(body)

    return apply


def _owners(body: Json) -> None:
    for owner in body["metadata"].get("ownerReferences", ()):
        owner.pop("uid", None)


def _being_deleted(body: Json) -> None:
    metadata = body["metadata"]
    if "deletionTimestamp" in metadata:
        metadata["deletionTimestamp"] = "<time>"


def _pod_status(body: Json) -> None:
    conditions = body["status"].get("conditions", ())
    is_ready = any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)
    body["status"] = {"phase": body["status"]["phase"], "ready": is_ready}


def _waiting(body: Json) -> None:
    for container in body["spec"].get("initContainers", ()):
        if container["name"] == "wait-gcs-ready":
            asked = re.search(r"ray health-check --address (\S+)", container["args"][0])
            container["args"] = [f"<waits for {asked[1] if asked else None}>"]


def _held(body: Json) -> None:
    body["metadata"].get("annotations", {}).pop(HELD, None)


def _endpoints(body: Json) -> None:
    body["metadata"]["name"] = f"{body['metadata']['generateName']}*"
    for each in body.get("endpoints") or ():
        for name in ("addresses", "nodeName", "zone"):
            each.pop(name, None)
        each["targetRef"].pop("uid", None)
    body["endpoints"] = sorted(
        body.get("endpoints") or (), key=lambda each: str(each["targetRef"]["name"])
    )
    body["ports"] = sorted(body.get("ports") or (), key=lambda each: str(each.get("name")))


def _cluster_address(body: Json) -> None:
    for name in ("clusterIP", "clusterIPs"):
        if body["spec"].get(name) not in ("None", ["None"]):
            body["spec"][name] = "<address>"


def _conditions(status: Json, generation: int) -> None:
    for name in ("lastUpdateTime", "stateTransitionTimes"):
        if name in status:
            status[name] = "<time>"
    if "observedGeneration" in status:
        status["observedGeneration"] = _age(status["observedGeneration"], generation)
    found = status.get("conditions", [])
    for each in found:
        each.pop("lastTransitionTime", None)
        if each["type"] != "ReplicaFailure":
            each.pop("message", None)
        if "observedGeneration" in each:
            each["observedGeneration"] = _age(each["observedGeneration"], generation)
    if found:
        status["conditions"] = sorted(found, key=lambda each: str(each["type"]))


def _age(observed: int, generation: int) -> str:
    return "<now>" if observed == generation else "<before>"


def _status(body: Json) -> None:
    generation = body["metadata"].pop("generation")
    _conditions(body["status"], generation)


def _copied_status(body: Json) -> None:
    for part in ("activeServiceStatus", "pendingServiceStatus"):
        copied = body["status"].get(part, {}).get("rayClusterStatus")
        if copied is not None and "conditions" in copied:
            body["status"][part]["rayClusterStatus"] = {
                "head": copied["head"],
                "endpoints": copied["endpoints"],
            }
        else:
            body["status"].get(part, {}).pop("rayClusterStatus", None)


def _event_words(body: Json) -> None:
    message = body.pop("message")
    if body["reason"].startswith("Failed"):
        body["words"] = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:*", message.partition(", ")[2])
    else:
        body["words"] = _PLACE.findall(message)[:1]


def _failure_words(body: Json) -> None:
    for each in body["status"].get("conditions", ()):
        if "message" in each:
            each["message"] = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:*", each["message"])


def _event(body: Json) -> None:
    body["metadata"] = {}
    for name in ("uid", "resourceVersion"):
        body["involvedObject"].pop(name, None)
    if "series" in body:
        body["series"] = "<repeated>"
    body["source"] = {}


RULES = (
    Rule(
        (),
        "uid, resourceVersion, managedFields, creationTimestamp, owners' uid, kind and version",
        "another run has others; kind and version are the folder's that an object lies in",
        _all(
            *(
                _drop("metadata", name)
                for name in ("uid", "resourceVersion", "managedFields", "creationTimestamp")
            ),
            _drop("apiVersion"),
            _drop("kind"),
            _owners,
        ),
    ),
    Rule(
        (),
        "the instant of a deletion",
        "another run has others; that an object is being deleted, and its grace, stay",
        _being_deleted,
    ),
    Rule(
        ("pods",),
        "spec.nodeName, and of the status all but phase and readiness",
        "in the recordings a stand-in gave pods their nodes and wrote their status",
        _all(_drop("spec", "nodeName"), _pod_status),
    ),
    Rule(
        ("pods",),
        "how a worker waits for its head",
        "KubeRay's shell text is its own; the emulation has another that asks the same address",
        _waiting,
    ),
    Rule(("pods",), "the annotation by which a test holds a pod", "it is the test's own", _held),
    Rule(
        ("endpointslices",),
        "name, addresses, nodes, zones, order, generation, time of the last change",
        "made up by Kubernetes or by the stand-in; whose address it is, and its state, stay",
        _all(
            _drop("metadata", "generation"),
            _drop("metadata", "annotations"),
            _endpoints,
        ),
    ),
    Rule(("services",), "addresses", "the API server hands them out", _cluster_address),
    Rule(
        ("rayclusters", "rayservices"),
        "times; the number of a generation, of which stays whether it is the present one; words "
        "of conditions but for a failure's; their order",
        "times differ, generations count every writer's changes, words are for people",
        _status,
    ),
    Rule(
        ("rayclusters",),
        "the port of the webhook in a failure",
        "every run has its own",
        _failure_words,
    ),
    Rule(
        ("rayservices",),
        "counts, state and conditions in the copy of a cluster's status",
        "KubeRay copies it when something else has changed: in the recordings it is minutes old",
        _copied_status,
    ),
    Rule(
        ("rayclusters", "rayservices"),
        "what kubectl remembers of an apply",
        "the tests do not use kubectl",
        _drop("metadata", "annotations", "kubectl.kubernetes.io/last-applied-configuration"),
    ),
    Rule(
        ("events",),
        "name, times, instance of the reporter, number of repetitions",
        "another run has others; that something was repeated stays",
        _all(
            _event,
            *(
                _drop(name)
                for name in (
                    "eventTime",
                    "firstTimestamp",
                    "lastTimestamp",
                    "reportingInstance",
                    "count",
                )
            ),
        ),
    ),
    Rule(
        ("events",),
        "words but for the object they are of, and the API server's own where it refused",
        "words are for people, and KubeRay's are its own",
        _event_words,
    ),
)
