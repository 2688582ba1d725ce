"""The Services and rights that KubeRay makes for a RayCluster and a RayService. Pure."""

from typing import Any

from autoscaling.provisioning.raycluster import CLUSTER_LABEL, NODE_TYPE_LABEL

from .ray_pods import (
    OURS,
    SERVICE_KIND_LABEL,
    SERVICE_NAME_LABEL,
    head_service,
    owner,
)

Json = dict[str, Any]

# What Ray listens on where the head's container says nothing.
_DEFAULT_PORTS = {
    "client": 10001,
    "dashboard": 8265,
    "gcs-server": 6379,
    "metrics": 8080,
    "serve": 8000,
}
SERVE_PORT = 8000
_RIGHTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "pods", ("get", "list", "watch", "patch")),
    ("", "pods/resize", ("patch",)),
    ("ray.io", "rayclusters", ("get", "patch")),
)


def rights(cluster: Json) -> list[Json]:
    """What the autoscaler beside the head may do: its account if none is named, role, binding."""
    name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
    account = _head_account(cluster)
    made = [] if account else [_named("v1", "ServiceAccount", name, cluster)]
    role = _named("rbac.authorization.k8s.io/v1", "Role", name, cluster)
    role["rules"] = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in _RIGHTS
    ]
    binding = _named("rbac.authorization.k8s.io/v1", "RoleBinding", name, cluster)
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": name,
    }
    subject = {"kind": "ServiceAccount", "name": account or name, "namespace": namespace}
    binding["subjects"] = [subject]
    return [*made, role, binding]


def cluster_services(cluster: Json) -> list[Json]:
    """The Service before the head, and the one that gives hosts of slices their names in DNS."""
    name = cluster["metadata"]["name"]
    identity = {
        CLUSTER_LABEL: name,
        NODE_TYPE_LABEL: "head",
        "ray.io/identifier": f"{name}-head",
    }
    # What a pod template says instead of these the Service goes by too; that of a RayService not.
    template = cluster["spec"]["headGroupSpec"]["template"].get("metadata", {})
    said = {name: template.get("labels", {}).get(name, value) for name, value in OURS.items()}
    head = _named("v1", "Service", head_service(cluster), cluster)
    head["metadata"]["labels"] = said | identity
    head["spec"] = _head_spec(cluster, said)
    groups = cluster["spec"].get("workerGroupSpecs", ())
    if all(group.get("numOfHosts", 1) == 1 for group in groups):
        return [head]
    hosts = _named("v1", "Service", f"{name}-headless", cluster)
    hosts["metadata"]["labels"] = {"ray.io/headless-worker-svc": name}
    hosts["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {CLUSTER_LABEL: name, NODE_TYPE_LABEL: "worker"},
    }
    return [head, hosts]


def service_services(service: Json, cluster: Json) -> list[Json]:
    """The Services of a RayService, before the head and before Serve's proxies of `cluster`."""
    name, cluster_name = service["metadata"]["name"], cluster["metadata"]["name"]
    origin = {SERVICE_KIND_LABEL: "RayService", SERVICE_NAME_LABEL: name}
    head = _named("v1", "Service", f"{name}-head-svc", service)
    head["metadata"]["labels"] = origin | {
        "ray.io/identifier": f"{name}-head",
        NODE_TYPE_LABEL: "head",
    }
    head["spec"] = _head_spec(cluster, OURS)
    serve = _named("v1", "Service", f"{name}-serve-svc", service)
    serve["metadata"]["labels"] = origin | {"ray.io/serve": f"{name}-serve"}
    serve["spec"] = {
        "ports": [{"name": "serve", "port": SERVE_PORT, "targetPort": SERVE_PORT}],
        "selector": {CLUSTER_LABEL: cluster_name, "ray.io/serve": "true"},
    }
    return [head, serve]


def head_ports(cluster: Json) -> dict[str, int]:
    """The ports of the head by name."""
    ray = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    found = {port["name"]: port["containerPort"] for port in ray.get("ports", ())}
    return dict(sorted((found or _DEFAULT_PORTS).items()))


def _head_spec(cluster: Json, labels: dict[str, str]) -> Json:
    name = cluster["metadata"]["name"]
    return {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "ports": [
            {"name": port, "port": number, "targetPort": number, "appProtocol": "tcp"}
            for port, number in head_ports(cluster).items()
        ],
        "selector": labels
        | {
            CLUSTER_LABEL: name,
            NODE_TYPE_LABEL: "head",
            "ray.io/identifier": f"{name}-head",
        },
    }


def _head_account(cluster: Json) -> str | None:
    spec = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    name: str | None = spec.get("serviceAccountName")
    return name


def _named(version: str, kind: str, name: str, of: Json) -> Json:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": of["metadata"]["namespace"],
            "labels": OURS | {CLUSTER_LABEL: of["metadata"]["name"]},
            "ownerReferences": [owner(of)],
        },
    }
