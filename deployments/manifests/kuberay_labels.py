"""The labels of a Ray pod: what KubeRay and the TPU webhook set, and what is left to others. Pure.

Source of everything here: pods recorded from KubeRay 1.7.0 and kuberay-tpu-webhook 1.3.5 on
2026-11-22. A pod has the labels of its template and those of its group besides, and where a
template sets one of KubeRay's, the template's stands.
"""

from collections.abc import Mapping

from deployments.manifests.names import COMPONENT_LABEL, INSTANCE_LABEL, NAME_LABEL, PART_OF_LABEL
from serving.domain.names.gke_names import HOST_INDEX_LABEL

HEAD_GROUP = "headgroup"  # KubeRay's name for the head's
CLUSTER_LABEL = "ray.io/cluster"
_RAY_PREFIX = "ray.io/"
# By these the TPU webhook, KubeRay's Services and its operator find pods.
_APP_LABELS = {NAME_LABEL: "kuberay", "app.kubernetes.io/created-by": "kuberay-operator"}
# What a group's own labels may not be: they reach the pods as well as Ray's nodes. The last is the
# webhook's. Other labels below `ray.io` are Ray's, for nodes, and are there to be set.
_KUBERAY_LABELS = frozenset(
    {
        *_APP_LABELS,
        CLUSTER_LABEL,
        "ray.io/group",
        "ray.io/identifier",
        "ray.io/is-ray-node",
        "ray.io/node-type",
        "ray.io/originated-from-cr-name",
        "ray.io/originated-from-crd",
        "ray.io/serve",
        "ray.io/worker-group-replica-index",
        "ray.io/worker-group-replica-name",
        HOST_INDEX_LABEL,
        "replicaIndex",
    }
)
_OUR_LABELS = frozenset({PART_OF_LABEL, INSTANCE_LABEL, COMPONENT_LABEL})


def kuberay_labels(cluster: str, group: str | None, *, is_of_service: bool) -> dict[str, str]:
    """Returns the labels that KubeRay gives every pod of a group; `None` is the head's group.

    Labels that tell one replica of a group from another are left out.
    """
    is_head = group is None
    kind = "head" if is_head else "worker"
    labels = _APP_LABELS | {
        CLUSTER_LABEL: cluster,
        "ray.io/group": HEAD_GROUP if group is None else group,
        "ray.io/identifier": f"{cluster}-{kind}",
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": kind,
    }
    if is_of_service:
        # Of every worker, whether a proxy runs on it or not.
        labels["ray.io/serve"] = "false" if is_head else "true"
    return labels


def why_not_in_template(name: str, value: object) -> str | None:
    """Returns why a pod template may not set this label to this value; `None` if it may."""
    if name in _APP_LABELS and value != _APP_LABELS[name]:
        return "KubeRay's own label, by which the TPU webhook and KubeRay's Services find its pods"
    is_kuberays = name.startswith(_RAY_PREFIX) or name in _KUBERAY_LABELS
    if is_kuberays and name not in _APP_LABELS and name != HOST_INDEX_LABEL:
        return "KubeRay and the TPU webhook set it on every pod, and count by it"
    return None


def why_not_in_group(name: str) -> str | None:
    """Returns why a group, whose labels reach its pods, may not have this one; `None` if it may."""
    if name in _KUBERAY_LABELS:
        return "it reaches the pods, where KubeRay and the TPU webhook set it"
    if name in _OUR_LABELS:
        return "it reaches the pods, where our Services, policies and budgets select by it"
    return None


def merged_labels(
    of_kuberay: Mapping[str, str], of_template: Mapping[str, str], of_group: Mapping[str, str]
) -> dict[str, str]:
    """The labels that a pod has in the end."""
    return {**of_kuberay, **of_group, **of_template}
