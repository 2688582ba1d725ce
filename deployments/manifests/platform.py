"""Renders what a namespace needs around a Ray cluster: rights, priorities, quota, network. Pure."""

from collections.abc import Sequence
from typing import Any

from deployments.manifests.cluster_config import ClusterConfig, UpgradeKind
from deployments.manifests.names import (
    DASHBOARD_PORT,
    EXPORTER_PORT,
    METRICS_PORT,
    NETWORK_CLAIMS,
    SERVE_PORT,
    Component,
    component_labels,
    instance_labels,
    priority_class,
    service_account,
)
from deployments.manifests.slice_groups import SliceGroup
from deployments.manifests.values import Values
from serving.domain.gke_names import GKE_CHIPS

Json = dict[str, Any]

# What `autoscaling.provisioning.kuberay` asks of the API, no more; a test compares the two. KubeRay
# grants the head's service account the autoscaler's rights by itself.
PROVISIONER_RULES: tuple[Json, ...] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["get", "patch"]},
    {"apiGroups": ["ray.io"], "resources": ["rayservices"], "verbs": ["get", "patch"]},
)
_PRIORITIES = {Component.GATEWAY: 1_000_000, Component.ENGINE: 900_000}
_RBAC = "rbac.authorization.k8s.io"
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def namespace(cluster: ClusterConfig) -> Json:
    """The namespace; pods in it that are not ours may do as little as ours."""
    # The exporter reads its host's devices, which the stricter levels refuse.
    labels = {"pod-security.kubernetes.io/warn": "baseline"}
    return _object("v1", "Namespace", cluster.namespace, {"labels": labels})


def service_accounts(cluster: ClusterConfig) -> list[Json]:
    """Returns one for each kind of pod. None of them may do anything unless it is said here."""
    made = []
    for component in Component:
        if component == Component.REDIS and cluster.redis.own is None:
            continue
        metadata: Json = {"namespace": cluster.namespace, "labels": instance_labels(cluster)}
        if cluster.google_service_account is not None:
            name = "iam.gke.io/gcp-service-account"
            metadata["annotations"] = {name: cluster.google_service_account}
        account = _object("v1", "ServiceAccount", service_account(cluster, component), metadata)
        made.append(account | {"automountServiceAccountToken": False})
    return made


def provisioner_rights(cluster: ClusterConfig) -> list[Json]:
    """The slice provisioner's Role, bound to the head's service account."""
    name = f"{cluster.name}-slice-provisioner"
    where: Json = {"namespace": cluster.namespace, "labels": instance_labels(cluster)}
    rules = [dict(rule) for rule in PROVISIONER_RULES]
    # The RayService's name is known; those of its clusters are made up.
    rules[-1]["resourceNames"] = [cluster.name]
    role = _object(f"{_RBAC}/v1", "Role", name, where) | {"rules": rules}
    binding = _object(f"{_RBAC}/v1", "RoleBinding", name, where) | {
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [
            {
                "kind": "ServiceAccount",
                "name": service_account(cluster, Component.HEAD),
                "namespace": cluster.namespace,
            }
        ],
    }
    return [role, binding]


def priority_classes(cluster: ClusterConfig) -> list[Json]:
    """Ranks head and gateways before engines.

    The loss of a gateway costs requests, the loss of an engine only a pause.
    """
    return [
        _object("scheduling.k8s.io/v1", "PriorityClass", priority_class(cluster, component), {})
        | {
            "description": f"{cluster.name}: {component.value}s",
            "globalDefault": False,
            # Nobody else's pods are thrown out for ours.
            "preemptionPolicy": "Never",
            "value": value,
        }
        for component, value in _PRIORITIES.items()
    ]


def resource_quota(values: Values, groups: Sequence[SliceGroup]) -> Json:
    """Allows the chips of all groups, and of a second cluster where an upgrade makes one."""
    cluster = values.cluster
    chips = sum(group.terms.max_slices * group.shape.num_chips for group in groups)
    match cluster.upgrade.kind:
        case UpgradeKind.IN_PLACE:
            percent = 100
        case UpgradeKind.NEW_CLUSTER:
            percent = 200
        case UpgradeKind.INCREMENTAL:
            percent = 100 + cluster.upgrade.max_surge_percent
    where = {"namespace": cluster.namespace, "labels": instance_labels(cluster)}
    hard = {f"requests.{GKE_CHIPS}": str(-(-chips * percent // 100))}
    quota = _object("v1", "ResourceQuota", f"{cluster.name}-chips", where)
    return quota | {"spec": {"hard": hard}}


def network_policies(cluster: ClusterConfig) -> list[Json]:
    """Lets our pods, the operator and Prometheus reach our pods, and clients the gateways."""
    every = instance_labels(cluster)
    among = {"from": [{"podSelector": {"matchLabels": every}}]}
    operator = _from_namespace(cluster.operator_namespace, DASHBOARD_PORT, SERVE_PORT)
    metrics = _from_namespace(cluster.monitoring_namespace, METRICS_PORT, EXPORTER_PORT, SERVE_PORT)
    clients = {"ports": [{"port": SERVE_PORT, "protocol": "TCP"}]}
    return [
        _network_policy(cluster, f"{cluster.name}-pods", every, [among, metrics]),
        _network_policy(
            cluster,
            f"{cluster.name}-head",
            component_labels(cluster, Component.HEAD),
            [operator],
        ),
        _network_policy(
            cluster,
            f"{cluster.name}-gateways",
            component_labels(cluster, Component.GATEWAY),
            [clients],
        ),
    ]


def disruption_budgets(values: Values) -> list[Json]:
    """Protects head and gateways. A slice's host has no budget: its slice drains on notice.

    `minAvailable` and not `maxUnavailable`: Kubernetes cannot count the pods of a RayCluster.
    """
    cluster, count = values.cluster, values.app.gateway.replicas
    least = {Component.HEAD: 1, Component.GATEWAY: max(1, count - 1)}
    where = {"namespace": cluster.namespace, "labels": instance_labels(cluster)}
    return [
        _object("policy/v1", "PodDisruptionBudget", f"{cluster.name}-{component.value}", where)
        | {
            "spec": {
                "minAvailable": number,
                "selector": {"matchLabels": component_labels(cluster, component)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
        }
        for component, number in least.items()
    ]


def network_claims(cluster: ClusterConfig) -> Json:
    """Claims all network interfaces of a host for its one pod.

    Source: GKE's page on managed DRANET.
    """
    where = {"namespace": cluster.namespace, "labels": instance_labels(cluster)}
    request = {
        "name": "netdev",
        "exactly": {"deviceClassName": "netdev.google.com", "allocationMode": "All"},
    }
    claims = _object("resource.k8s.io/v1", "ResourceClaimTemplate", NETWORK_CLAIMS, where)
    return claims | {"spec": {"spec": {"devices": {"requests": [request]}}}}


def _network_policy(
    cluster: ClusterConfig, name: str, labels: dict[str, str], ingress: list[Json]
) -> Json:
    where = {"namespace": cluster.namespace, "labels": instance_labels(cluster)}
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, where) | {
        "spec": {
            "ingress": ingress,
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress"],
        }
    }


def _from_namespace(name: str, *ports: int) -> Json:
    return {
        "from": [{"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: name}}}],
        "ports": [{"port": port, "protocol": "TCP"} for port in ports],
    }


def _object(api_version: str, kind: str, name: str, metadata: Json) -> Json:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, **metadata}}
