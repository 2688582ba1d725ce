"""Checks the names that objects give of each other: pods, accounts, classes, quota. Pure."""

import posixpath
from collections.abc import Iterator

from deployments.validation.documents import (
    Folder,
    Json,
    mapping,
    ray_clusters,
    sequence,
    texts,
    value_at,
)
from deployments.validation.found_pods import FoundPod, all_pods, selects
from deployments.validation.groups import slice_groups_in
from serving.domain.errors import Problem
from serving.domain.names.gke_names import GKE_CHIPS

_SELECTORS = {
    "NetworkPolicy": ("spec", "podSelector"),
    "PodDisruptionBudget": ("spec", "selector"),
    "PodMonitor": ("spec", "selector"),
}


def reference_problems(folder: Folder) -> Iterator[Problem]:
    """Checks selectors, names, budgets and quotas against the other objects of the folder."""
    pods = all_pods(folder)
    yield from _selector_problems(folder, [pod.labels for pod in pods])
    yield from _account_problems(folder, pods)
    yield from _budget_problems(folder)
    yield from _quota_problems(folder)
    yield from _route_problems(folder)
    yield from _kustomization_problems(folder)
    yield from _repeated(folder)


def _selector_problems(folder: Folder, pods: list[Json]) -> Iterator[Problem]:
    for manifest in folder.of_kind(*_SELECTORS):
        path = _SELECTORS[manifest.kind]
        selector = mapping(manifest.body, *path)
        if not any(selects(selector, labels) for labels in pods):
            yield manifest.problem(
                ".".join(path), "selects no pod", _labels_of(pods), _format_selector(selector)
            )
    for manifest in folder.of_kind("Service"):
        labels = mapping(manifest.body, "spec", "selector")
        if not any(selects({"matchLabels": labels}, found) for found in pods):
            value = _format_selector({"matchLabels": labels})
            yield manifest.problem("spec.selector", "selects no pod", _labels_of(pods), value)
    for manifest in folder.of_kind("DaemonSet"):
        labels = mapping(manifest.body, "spec", "template", "metadata", "labels")
        selector = mapping(manifest.body, "spec", "selector")
        if not selects(selector, labels):
            allowed = f"allowed: {_format_selector({'matchLabels': labels})}"
            complaint = "does not select its own pods"
            yield manifest.problem("spec.selector", complaint, allowed, _format_selector(selector))


def _format_selector(selector: Json) -> str:
    return texts([f"{k}={v}" for k, v in sorted(mapping(selector, "matchLabels").items())])


def _labels_of(pods: list[Json]) -> str:
    name = "app.kubernetes.io/component"
    found = sorted({str(labels[name]) for labels in pods if name in labels})
    return f"allowed: labels that pods have; their {name} is one of {texts(found)}"


def _account_problems(folder: Folder, pods: list[FoundPod]) -> Iterator[Problem]:
    fields = {"serviceAccountName": "ServiceAccount", "priorityClassName": "PriorityClass"}
    for pod in pods:
        path = f"{pod.path}.spec"
        for field, kind in fields.items():
            value = pod.spec.get(field)
            if value is not None and value not in folder.names(kind):
                allowed = f"allowed: {texts(sorted(folder.names(kind)))}"
                complaint = f"there is no {kind} of this name"
                yield pod.manifest.problem(f"{path}.{field}", complaint, allowed, value)
        for claim in sequence(pod.spec, "resourceClaims"):
            value = mapping(claim).get("resourceClaimTemplateName")
            if value not in folder.names("ResourceClaimTemplate"):
                allowed = f"allowed: {texts(sorted(folder.names('ResourceClaimTemplate')))}"
                complaint = "there is no ResourceClaimTemplate of this name"
                yield pod.manifest.problem(f"{path}.resourceClaims", complaint, allowed, value)


def _budget_problems(folder: Folder) -> Iterator[Problem]:
    for manifest in folder.of_kind("PodDisruptionBudget"):
        spec = mapping(manifest.body, "spec")
        if not isinstance(spec.get("minAvailable"), int):
            field = "spec.minAvailable"
            complaint = "Kubernetes counts the pods of a RayCluster in no other way"
            value = spec.get("minAvailable", spec.get("maxUnavailable"))
            yield manifest.problem(field, complaint, "allowed: a whole number of pods", value)


def _quota_problems(folder: Folder) -> Iterator[Problem]:
    for manifest, path, cluster in ray_clusters(folder):
        chips = 0
        for group in slice_groups_in(manifest, path, cluster):
            most = group.spec.get("maxReplicas")
            if group.shape is not None and isinstance(most, int):
                chips += most * group.shape.num_chips
        for quota in folder.of_kind("ResourceQuota"):
            name = f"requests.{GKE_CHIPS}"
            hard = value_at(quota.body, "spec", "hard", name)
            is_number = str(hard).isdigit()
            if quota.namespace == manifest.namespace and is_number and int(hard) < chips:
                complaint = (
                    f"fewer chips than the groups of {manifest.kind} {manifest.name} may have"
                )
                yield quota.problem(f"spec.hard[{name}]", complaint, f"allowed: {chips}", hard)


def _route_problems(folder: Folder) -> Iterator[Problem]:
    for manifest in folder.of_kind("HTTPRoute"):
        for parent in sequence(manifest.body, "spec", "parentRefs"):
            name = mapping(parent).get("name")
            if name not in folder.names("Gateway"):
                allowed = f"allowed: {texts(sorted(folder.names('Gateway')))}"
                yield manifest.problem("spec.parentRefs", "no such Gateway", allowed, name)


def _kustomization_problems(folder: Folder) -> Iterator[Problem]:
    kustomizations = folder.of_kind("Kustomization")
    listed = set()
    for kustomization in kustomizations:
        base = kustomization.file.rpartition("/")[0]
        for resource in sequence(kustomization.body, "resources"):
            path = posixpath.normpath(posixpath.join(base, str(resource)))
            listed.add(path)
            if path not in folder.files and f"{path}/kustomization.yaml" not in folder.files:
                complaint = "there is no such file or folder"
                yield kustomization.problem(
                    "resources", complaint, "allowed: files beside it", resource
                )
    if not kustomizations:
        return
    for manifest in folder.manifests:
        if manifest.kind != "Kustomization" and manifest.file not in listed:
            complaint = "no kustomization has it, so nobody applies it"
            yield Problem(manifest.file, complaint, "required: in the resources of its folder")


def _repeated(folder: Folder) -> Iterator[Problem]:
    """Yields each object that one kustomization takes twice: the second one would win."""
    seen: dict[tuple[str, str, str | None, str], str] = {}
    for manifest in folder.manifests:
        key = (manifest.kind, manifest.name, manifest.namespace, manifest.file.rpartition("/")[0])
        if manifest.kind != "Kustomization" and key in seen:
            yield manifest.problem(
                "metadata.name", f"also in {seen[key]}", "allowed: once", manifest.name
            )
        seen.setdefault(key, manifest.file)
