"""By what KubeRay tells whether a RayCluster is still what its RayService asks for. Pure."""

import copy
import hashlib
import json
from typing import Any

Json = dict[str, Any]

HASH_ANNOTATION = "ray.io/hash-without-replicas-and-workers-to-delete"
NUM_GROUPS_ANNOTATION = "ray.io/num-worker-groups"
_OF_SCALING = ("replicas", "minReplicas", "maxReplicas", "scaleStrategy")


def spec_hash(spec: Json, num_groups: int | None = None) -> str:
    """A hash of a cluster's spec without what scaling changes.

    With `num_groups` only that many of the worker groups count. The value is not KubeRay's, which
    hashes what Go makes of the spec.
    """
    counted = copy.deepcopy(spec)
    counted["workerGroupSpecs"] = counted.get("workerGroupSpecs", [])[:num_groups]
    for group in counted["workerGroupSpecs"]:
        for name in _OF_SCALING:
            group.pop(name, None)
    text = json.dumps(counted, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32].upper()


def annotations(spec: Json, version: str) -> dict[str, str]:
    """What a RayService writes on a cluster that it makes or brings up to date."""
    return {
        HASH_ANNOTATION: spec_hash(spec),
        NUM_GROUPS_ANNOTATION: str(len(spec.get("workerGroupSpecs", ()))),
        "ray.io/kuberay-version": version,
    }
