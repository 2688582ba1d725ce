"""The names that GKE, KubeRay and we use on nodes, pods and worker groups. A leaf.

One of them is computed: the name of what a group's pods are made from, `template_hash`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Ours, on a worker group: the compute class as `serve_config.yaml` calls it. Without it, GKE's name
# for the class counts.
COMPUTE_CLASS_LABEL = "slicewise.io/compute-class"
# Ours, on a worker group and so on its nodes in Ray: that control processes run there, and no
# gateway. A node without the label takes either.
ROLE_LABEL = "slicewise.io/role"
CONTROL_ROLE = "control"
GKE_COMPUTE_CLASS = "cloud.google.com/compute-class"
GKE_ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
GKE_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GKE_CHIPS = "google.com/tpu"
# Which host of its slice a pod is. KubeRay sets it on slices of several hosts; on those of one it
# is ours: without it the TPU webhook counts by itself, and names a new slice like a living one.
# Source: recorded from KubeRay 1.7.0 and kuberay-tpu-webhook 1.3.5 on 2026-11-22. Webhooks before
# v1.3.0 do not read it.
HOST_INDEX_LABEL = "ray.io/replica-host-index"
# Ours, on a pod template and so on every pod made from it: tells pods of an older template.
TEMPLATE_HASH_ANNOTATION = "slicewise.io/template-hash"
# What of a group, or of the head, its pods are made from beside the template.
POD_FIELDS = ("labels", "rayStartParams", "resources")
# The idle timeout of slices, 116 days: only the slice provisioner decides how many there are, so
# Ray's autoscaler must never find one idle.
NEVER_IDLE_S = 10_000_000


def template_hash(group: Mapping[str, Any]) -> str:
    """Returns the name of what a group's pods are made from: 16 hexadecimal digits.

    `group` is an entry of `workerGroupSpecs`, or `headGroupSpec`. Counts and bounds are not in it,
    nor is the annotation itself.
    """
    made_from = {name: group.get(name) or {} for name in POD_FIELDS}
    made_from["template"] = without_template_hash(group["template"])
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_of_template(made: Mapping[str, Any]) -> str | None:
    """Returns the hash that a pod, or a template, has as its annotation; `None` if it has none."""
    annotations = (made.get("metadata") or {}).get("annotations") or {}
    value: str | None = annotations.get(TEMPLATE_HASH_ANNOTATION)
    return value


def without_template_hash(template: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pod template without our annotation; what is left empty by that is left out."""
    metadata = dict(template.get("metadata") or {})
    annotations = dict(metadata.pop("annotations", None) or {})
    annotations.pop(TEMPLATE_HASH_ANNOTATION, None)
    if annotations:
        metadata["annotations"] = annotations
    return dict(template) | {"metadata": metadata}


def with_template_hash(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pod template with the annotation of its group as it is."""
    template = without_template_hash(group["template"])
    annotations = dict(template["metadata"].get("annotations") or {})
    annotations[TEMPLATE_HASH_ANNOTATION] = template_hash(group)
    return template | {"metadata": template["metadata"] | {"annotations": annotations}}
