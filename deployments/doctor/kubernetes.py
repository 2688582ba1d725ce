"""Checks a Kubernetes cluster against the manifests that are, or are to be, applied to it.

`ask_kubernetes` reads, each part by itself, so that a right that is missing hides one part only;
the checks are pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deployments.applied import RunningCluster, not_come_over, read_running
from deployments.doctor.findings import Finding, Unknown, error, ok, warning
from deployments.doctor.operators import (
    Needs,
    check_operator,
    check_webhook_version,
    find_operator,
)
from deployments.doctor.tpu_webhook import check_tpu_webhook
from deployments.kubectl import Kubectl, KubectlError
from deployments.validation.documents import Folder, mapping, ray_clusters, sequence, value_at
from deployments.validation.found_pods import ray_pods
from deployments.validation.schemas import Schemas
from serving.domain.names.gke_names import GKE_CHIPS

Json = Mapping[str, Any]
_Value = TypeVar("_Value")
_CRDS = "customresourcedefinitions.apiextensions.k8s.io"
_WEBHOOKS = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
# Kubernetes' own groups, and kustomize's, which is no API.
_BUILT_IN = frozenset(
    {
        "kustomize.config.k8s.io",
        "networking.k8s.io",
        "rbac.authorization.k8s.io",
        "resource.k8s.io",
        "scheduling.k8s.io",
    }
)


@dataclass(frozen=True, slots=True)
class KubernetesFacts:
    """What the cluster has; `Unknown` where kubectl was refused or nobody answered.

    `crds` are by name, `None` where there is none. `running` is by kind.
    """

    deployments: Sequence[Json] | Unknown
    webhooks: Sequence[Json] | Unknown
    crds: Mapping[str, Json | None] | Unknown
    namespace_labels: Mapping[str, str]
    running: Mapping[str, RunningCluster] | Unknown


def ask_kubernetes(kubectl: Kubectl, folder: Folder) -> KubernetesFacts:
    """Reads what the checks need of the cluster."""
    namespace, name = _place_of(folder)

    def read_crds() -> Mapping[str, Json | None]:
        return {crd: kubectl.get(_CRDS, crd) for crd in sorted(crd_names(folder))}

    def read_clusters() -> Mapping[str, RunningCluster]:
        kinds = {cluster.kind for cluster, _, _ in ray_clusters(folder)}
        return {kind: read_running(kubectl, kind, name, namespace) for kind in sorted(kinds)}

    labels = _asked(lambda: mapping(kubectl.get("namespaces", namespace), "metadata", "labels"))
    return KubernetesFacts(
        _asked(lambda: kubectl.list_objects("deployments.apps")),
        _asked(lambda: kubectl.list_objects(_WEBHOOKS)),
        _asked(read_crds),
        {"kubernetes.io/metadata.name": namespace}
        | ({} if isinstance(labels, Unknown) else labels),
        _asked(read_clusters),
    )


def check_kubernetes(folder: Folder, facts: KubernetesFacts) -> Iterator[Finding]:
    """Checks operator, webhook, schemas, and what has not come over to the running cluster."""
    needs = needs_of(folder)
    clusters = [] if isinstance(facts.running, Unknown) else list(facts.running.values())
    if isinstance(facts.deployments, Unknown):
        yield _unknown("operators' Deployments", facts.deployments)
    deployments = [] if isinstance(facts.deployments, Unknown) else facts.deployments
    made = [one.cluster for one in clusters if one.cluster is not None]
    yield from check_operator(find_operator(deployments, made), needs)
    yield from check_webhook_version(deployments, needs)
    if isinstance(facts.webhooks, Unknown):
        yield _unknown("TPU webhook", facts.webhooks)
    else:
        yield from check_tpu_webhook(
            facts.webhooks,
            tpu_pod_labels(folder),
            facts.namespace_labels,
            has_multi_host=needs.has_multi_host,
        )
    yield from _check_crds(folder, facts.crds)
    yield from _check_running(facts.running)


def needs_of(folder: Folder) -> Needs:
    """Returns what the manifests need of operator and webhook."""
    hosts = [
        int((pod.group or {}).get("numOfHosts") or 1)
        for pod in ray_pods(folder)
        if _has_chips(pod.spec)
    ]
    strategies = {
        value_at(service.body, "spec", "upgradeStrategy", "type")
        for service in folder.of_kind("RayService")
    }
    return Needs(
        has_multi_host=any(count > 1 for count in hosts),
        has_single_host=any(count == 1 for count in hosts),
        is_incremental="NewClusterWithIncrementalUpgrade" in strategies,
    )


def tpu_pod_labels(folder: Folder) -> dict[str, dict[str, str]]:
    """Returns the labels of TPU pods with KubeRay's own, by worker group."""
    return {
        str((pod.group or {}).get("groupName")): pod.labels
        for pod in ray_pods(folder)
        if _has_chips(pod.spec)
    }


def crd_names(folder: Folder) -> set[str]:
    """Returns the names of the CRDs that define the kinds of a folder."""
    names = set()
    for manifest in folder.manifests:
        group, _, _ = str(manifest.body.get("apiVersion", "")).rpartition("/")
        if "." in group and group not in _BUILT_IN:
            names.add(f"{_plural(manifest.kind)}.{group}")
    return names


def _plural(kind: str) -> str:
    word = kind.lower()
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith("s") else f"{word}s"


def _check_crds(folder: Folder, crds: Mapping[str, Json | None] | Unknown) -> Iterator[Finding]:
    if isinstance(crds, Unknown):
        yield _unknown("CRDs", crds)
        return
    for name in sorted(name for name, crd in crds.items() if crd is None):
        fix = "install what brings it, or leave its objects out in an overlay"
        yield error(f"CRD {name}", "none", "one: manifests have objects of it", fix)
    schemas = Schemas(dict(crd) for crd in crds.values() if crd is not None)
    num_fit = 0
    for manifest in folder.manifests:
        if not schemas.has(manifest):
            continue
        problems = list(schemas.problems(manifest))
        num_fit += not problems
        for problem in problems:
            found = f"{problem.complaint}" + (f": {problem.value}" if problem.value else "")
            fix = "upgrade the CRDs together with their operator, or leave the field out"
            yield error(f"{problem.path}", found, "what the cluster's CRD knows", fix)
    yield ok("CRDs", f"{num_fit} objects fit the schemas of this cluster")


def _check_running(running: Mapping[str, RunningCluster] | Unknown) -> Iterator[Finding]:
    if isinstance(running, Unknown):
        yield _unknown("running cluster", running)
        return
    for kind, one in running.items():
        if one.cluster is None:
            continue
        what = f"{kind} and what runs of it"
        lines = list(not_come_over(one))
        for line in lines:
            fix = "the slice provisioner carries it over: see its log; else as said"
            yield warning(what, line, "the same in both", fix)
        if not lines:
            yield ok(what, f"cluster {one.cluster['metadata']['name']} has all that was applied")


def _asked(read: Callable[[], _Value]) -> _Value | Unknown:
    try:
        return read()
    except KubectlError as error:
        return Unknown(f"{error}")


def _unknown(what: str, unknown: Unknown) -> Finding:
    return warning(what, f"not read: {unknown.reason}", "read", "ask for the right to read it")


def _has_chips(spec: Json) -> bool:
    containers = sequence(spec, "containers")
    return any(GKE_CHIPS in mapping(one, "resources", "limits") for one in containers)


def _place_of(folder: Folder) -> tuple[str, str]:
    """Returns namespace and name of the first Ray cluster; both variants have the same."""
    cluster = next((cluster for cluster, _, _ in ray_clusters(folder)), None)
    if cluster is None:
        return "default", ""
    return cluster.namespace or "default", cluster.name
