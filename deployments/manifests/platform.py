"""Renders what a namespace needs around a Ray cluster: rights, priorities, quota, network. Pure."""

from collections.abc import Sequence

from deployments.manifests.cluster_config import ClusterConfig, UpgradeKind
from deployments.manifests.control_pool import num_control_pods
from deployments.manifests.names import (
    DASHBOARD_PORT,
    EXPORTER_PORT,
    METRICS_PORT,
    NETWORK_CLAIMS,
    PROVISIONER_PORT,
    SERVE_PORT,
    Component,
    Json,
    component_labels,
    instance_labels,
    namespaced_object,
    priority_class,
    service_account,
)
from deployments.manifests.slice_groups import SliceGroup
from deployments.manifests.values import Values
from serving.domain.names.gke_names import GKE_CHIPS

# What `autoscaling.provisioning.kuberay` asks of the API, no more; a test compares the two. KubeRay
# grants the head's service account the autoscaler's rights by itself.
PROVISIONER_RULES: tuple[Json, ...] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["list", "patch", "watch"]},
    {"apiGroups": ["ray.io"], "resources": ["rayservices"], "verbs": ["list", "watch"]},
)
# What `autoscaling.provisioning.sidecar.conditions` reads beside that, to show it: in the
# namespace, and of kinds that lie in none.
CONDITION_RULES: tuple[Json, ...] = (
    {"apiGroups": [""], "resources": ["resourcequotas"], "verbs": ["list", "watch"]},
)
CLASS_RULES: tuple[Json, ...] = (
    {
        "apiGroups": ["cloud.google.com"],
        "resources": ["computeclasses"],
        "verbs": ["list", "watch"],
    },
)
# What `autoscaling.node_reader` asks of the API, about its own node. Kubernetes cannot grant a node
# by a name that is not known before, so these are the rights to read every node's object.
NODE_READER_RULES: tuple[Json, ...] = (
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
)
_PRIORITIES = {Component.GATEWAY: 1_000_000, Component.ENGINE: 900_000}
_RBAC = "rbac.authorization.k8s.io"
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def namespace(cluster: ClusterConfig) -> Json:
    """The namespace. Kubernetes warns of pods in it that break the level `baseline`."""
    # It refuses none: hosts of slices have capabilities that the stricter levels forbid.
    labels = {"pod-security.kubernetes.io/warn": "baseline"}
    metadata = {"name": cluster.namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def service_accounts(cluster: ClusterConfig) -> list[Json]:
    """Returns one for each kind of pod. None has a right that is not granted in this module."""
    made = []
    for component in Component:
        if component == Component.REDIS and cluster.redis.own is None:
            continue
        name = service_account(cluster, component)
        account = namespaced_object(cluster, "v1", "ServiceAccount", name)
        if cluster.google_service_account is not None:
            annotation = "iam.gke.io/gcp-service-account"
            account["metadata"]["annotations"] = {annotation: cluster.google_service_account}
        made.append(account | {"automountServiceAccountToken": False})
    return made


def provisioner_rights(cluster: ClusterConfig) -> list[Json]:
    """The slice provisioner's Role and ClusterRole, bound to the head's service account."""
    name = f"{cluster.name}-slice-provisioner"
    rules = [dict(rule) for rule in PROVISIONER_RULES]
    # The RayService's name is known; KubeRay makes up those of its clusters. A name covers a list
    # or a watch whose field selector is that name.
    rules[-1]["resourceNames"] = [cluster.name]
    rules += [dict(rule) for rule in CONDITION_RULES]
    role = namespaced_object(cluster, f"{_RBAC}/v1", "Role", name) | {"rules": rules}
    binding = namespaced_object(cluster, f"{_RBAC}/v1", "RoleBinding", name)
    # Every installation in a cluster has its own.
    full_name = f"{cluster.namespace}-{name}"
    metadata = {"labels": instance_labels(cluster), "name": full_name}
    whole = {"apiVersion": f"{_RBAC}/v1", "metadata": metadata}
    class_rules = [dict(rule) for rule in CLASS_RULES]
    return [
        role,
        binding | _bound(cluster, "Role", name),
        whole | {"kind": "ClusterRole", "rules": class_rules},
        whole | {"kind": "ClusterRoleBinding"} | _bound(cluster, "ClusterRole", full_name),
    ]


def node_reader_rights(cluster: ClusterConfig) -> list[Json]:
    """The node reader's ClusterRole, bound to the service account of the hosts of slices.

    Nodes are in no namespace, so the names carry the installation's.
    """
    name = f"{cluster.namespace}-{cluster.name}-node-reader"
    head = {"apiVersion": f"{_RBAC}/v1"}
    metadata = {"labels": instance_labels(cluster), "name": name}
    rules = [dict(rule) for rule in NODE_READER_RULES]
    bound = _bound(cluster, "ClusterRole", name, Component.ENGINE)
    return [
        head | {"kind": "ClusterRole", "metadata": dict(metadata), "rules": rules},
        head | {"kind": "ClusterRoleBinding", "metadata": dict(metadata)} | bound,
    ]


def priority_classes(cluster: ClusterConfig) -> list[Json]:
    """Ranks all that is off TPU hosts before engines, whose loss costs requests only a pause."""
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": priority_class(cluster, component)},
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
    hard = {f"requests.{GKE_CHIPS}": str(-(-chips * percent // 100))}
    quota = namespaced_object(cluster, "v1", "ResourceQuota", f"{cluster.name}-chips")
    return quota | {"spec": {"hard": hard}}


def network_policies(values: Values) -> list[Json]:
    """Lets our pods, the operator and Prometheus reach our pods, and clients the gateways."""
    cluster, own = values.cluster, values.app.gateway.metrics_ports
    every = instance_labels(cluster)
    head = component_labels(cluster, Component.HEAD)
    gateway = component_labels(cluster, Component.GATEWAY)
    among = {"from": [{"podSelector": {"matchLabels": every}}]}
    operator = _from_namespace(cluster.operator_namespace, DASHBOARD_PORT, SERVE_PORT)
    ports = METRICS_PORT, EXPORTER_PORT, SERVE_PORT, PROVISIONER_PORT, *own
    metrics = _from_namespace(cluster.monitoring_namespace, *ports)
    clients = {"ports": [{"port": SERVE_PORT, "protocol": "TCP"}]}
    return [
        _network_policy(cluster, f"{cluster.name}-pods", every, [among, metrics]),
        _network_policy(cluster, f"{cluster.name}-head", head, [operator]),
        _network_policy(cluster, f"{cluster.name}-gateways", gateway, [clients]),
    ]


def disruption_budgets(values: Values) -> list[Json]:
    """Protects head, gateways, control processes: one pod of each at a time.

    A slice's host has no budget: its slice drains on notice. `minAvailable` and not
    `maxUnavailable`: Kubernetes cannot count the pods of a RayCluster.
    """
    cluster, count = values.cluster, values.app.gateway_count.number
    least = {
        Component.HEAD: 1,
        Component.GATEWAY: max(1, count - 1),
        Component.CONTROL: num_control_pods(cluster, values.app) - 1,
    }
    kind = "PodDisruptionBudget"
    return [
        namespaced_object(cluster, "policy/v1", kind, f"{cluster.name}-{component.value}")
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
    """Claims all interfaces of a host for its one pod. Source: GKE's page on managed DRANET."""
    request = {
        "name": "netdev",
        "exactly": {"deviceClassName": "netdev.google.com", "allocationMode": "All"},
    }
    kind = "ResourceClaimTemplate"
    claims = namespaced_object(cluster, "resource.k8s.io/v1", kind, NETWORK_CLAIMS)
    return claims | {"spec": {"spec": {"devices": {"requests": [request]}}}}


def _bound(
    cluster: ClusterConfig, kind: str, name: str, component: Component = Component.HEAD
) -> Json:
    """Returns what binds a role to the service account of a component's pods."""
    account = service_account(cluster, component)
    subject = {"kind": "ServiceAccount", "name": account, "namespace": cluster.namespace}
    return {
        "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": name},
        "subjects": [subject],
    }


def _network_policy(
    cluster: ClusterConfig, name: str, labels: dict[str, str], ingress: list[Json]
) -> Json:
    return namespaced_object(cluster, "networking.k8s.io/v1", "NetworkPolicy", name) | {
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
