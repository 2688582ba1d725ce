"""The pods that a folder's objects would make, and the labels by which others select them.

Labels of Ray pods are those of their template together with KubeRay's. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deployments.manifests.kuberay_labels import kuberay_labels, merged_labels
from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    ray_clusters,
    sequence,
)
from serving.domain.names.gke_names import CONTROL_ROLE, GKE_CHIPS, ROLE_LABEL


@dataclass(frozen=True, slots=True)
class FoundPod:
    """The pods of one template at `path`; `group`: the worker group's spec, `None` without one."""

    manifest: KubernetesManifest
    path: str
    group: Json | None
    template: Json
    labels: dict[str, str]

    @property
    def spec(self) -> Json:
        """The spec of the pods."""
        return mapping(self.template, "spec")

    @property
    def is_gateway(self) -> bool:
        """Returns whether gateways run there: workers of Ray without chips and without a role."""
        if self.group is None or self.is_control:
            return False
        resources = mapping(self.spec, "containers", 0, "resources")
        return GKE_CHIPS not in mapping(resources, "limits")

    @property
    def is_control(self) -> bool:
        """Returns whether these are the nodes of control processes."""
        return mapping(self.group, "labels").get(ROLE_LABEL) == CONTROL_ROLE


def ray_pods(folder: Folder) -> Iterator[FoundPod]:
    """Yields the pods of every Ray cluster, the head first, with the labels that KubeRay adds."""
    for manifest, path, cluster in ray_clusters(folder):
        is_of_service = manifest.kind == "RayService"
        # KubeRay makes up the names of a RayService's clusters.
        name = f"{manifest.name}-(made up)" if is_of_service else manifest.name
        found: list[tuple[str, Json | None, Json]] = [
            ("headGroupSpec", None, mapping(cluster, "headGroupSpec"))
        ]
        for spec in sequence(cluster, "workerGroupSpecs"):
            group = mapping(spec)
            found.append((f"workerGroupSpecs[{group.get('groupName')}]", group, group))
        for where, group_or_none, owner in found:
            template = mapping(owner, "template")
            group_name = None if group_or_none is None else str(group_or_none.get("groupName"))
            labels = merged_labels(
                kuberay_labels(name, group_name, is_of_service=is_of_service),
                mapping(template, "metadata", "labels"),
                mapping(owner, "labels"),
            )
            yield FoundPod(manifest, f"{path}.{where}.template", group_or_none, template, labels)


def all_pods(folder: Folder) -> list[FoundPod]:
    """Returns the pods of Ray and all others."""
    found = list(ray_pods(folder))
    for manifest in folder.of_kind("DaemonSet", "Deployment", "StatefulSet"):
        template = mapping(manifest.body, "spec", "template")
        labels = {**mapping(template, "metadata", "labels")}
        found.append(FoundPod(manifest, "spec.template", None, template, labels))
    return found


def selects(selector: Json, labels: Json) -> bool:
    """Returns whether a selector takes pods with these labels; of expressions it knows `Exists`."""
    wanted = mapping(selector, "matchLabels")
    keys = [
        mapping(entry).get("key")
        for entry in sequence(selector, "matchExpressions")
        if mapping(entry).get("operator") == "Exists"
    ]
    has_all = all(labels.get(name) == value for name, value in wanted.items())
    return has_all and all(key in labels for key in keys)
