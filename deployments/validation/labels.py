"""Checks labels of Ray pods: KubeRay's and the TPU webhook's are left to them. Pure.

Without its own labels on them, the webhook does not see pods, and none gets TPU_NAME or
TPU_WORKER_ID; without a host index on single hosts, it gives names of living slices again.
"""

from collections.abc import Iterator

from deployments.manifests.kuberay_labels import why_not_in_group, why_not_in_template
from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    ray_clusters,
    sequence,
)
from deployments.validation.groups import FoundGroup, slice_groups_in
from serving.domain.errors import Problem
from serving.domain.names.gke_names import HOST_INDEX_LABEL

_FIRST_HOST = "0"
_TEMPLATE_LABELS = "template.metadata.labels"
_FIELD = f"{_TEMPLATE_LABELS}[{HOST_INDEX_LABEL}]"


def label_problems(folder: Folder) -> Iterator[Problem]:
    """Checks the labels of every Ray cluster's head, gateways and hosts."""
    for manifest, path, cluster in ray_clusters(folder):
        yield from _owned(manifest, f"{path}.headGroupSpec", mapping(cluster, "headGroupSpec"))
        groups = {group.name: group for group in slice_groups_in(manifest, path, cluster)}
        for entry in sequence(cluster, "workerGroupSpecs"):
            spec = mapping(entry)
            name = str(spec.get("groupName"))
            where = f"{path}.workerGroupSpecs[{name}]"
            yield from _owned(manifest, where, spec)
            if name in groups:
                yield from _host_index_problems(groups[name])
            elif HOST_INDEX_LABEL in _labels(spec):
                complaint = "its pods are no hosts of slices"
                value = _labels(spec)[HOST_INDEX_LABEL]
                yield manifest.problem(f"{where}.{_FIELD}", complaint, "allowed: nothing", value)


def _owned(manifest: KubernetesManifest, where: str, spec: Json) -> Iterator[Problem]:
    for name, value in _labels(spec).items():
        complaint = why_not_in_template(name, value)
        if complaint is not None:
            field = f"{where}.{_TEMPLATE_LABELS}[{name}]"
            yield manifest.problem(field, complaint, "allowed: nothing, it is not ours", value)
    for name, value in mapping(spec, "labels").items():
        complaint = why_not_in_group(name)
        if complaint is not None:
            allowed = "allowed: nothing, it is not for a group to say"
            yield manifest.problem(f"{where}.labels[{name}]", complaint, allowed, value)


def _host_index_problems(group: FoundGroup) -> Iterator[Problem]:
    """Checks the host index: we set it for slices of one host, KubeRay for others."""
    if group.shape is None:
        return
    value = _labels(group.spec).get(HOST_INDEX_LABEL)
    if group.shape.num_hosts == 1 and value != _FIRST_HOST:
        complaint = (
            "on slices of one host KubeRay sets none, and the TPU webhook then gives a new slice "
            "the name of a living one"
        )
        yield group.problem(_FIELD, complaint, f'allowed: "{_FIRST_HOST}"', value)
    if group.shape.num_hosts > 1 and value is not None:
        complaint = f"each of the {group.shape.num_hosts} hosts has its own, which KubeRay sets"
        yield group.problem(_FIELD, complaint, "allowed: nothing", value)


def _labels(spec: Json) -> Json:
    return mapping(spec, "template", "metadata", "labels")
