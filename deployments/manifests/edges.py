"""The edges of an installation: the way in for clients, and what Prometheus reads. Pure.

Gateway API v1 and the Prometheus operator's v1; on GKE the first is built in, the second is not.
"""

from deployments.manifests.cluster_config import ClusterConfig
from deployments.manifests.names import (
    EXPORTER_PORT_NAME,
    READY_PATH,
    SERVE_PORT,
    Component,
    Json,
    component_labels,
    gateway_port,
    instance_labels,
    namespaced_object,
    serve_service,
)
from deployments.manifests.values import Values

# Of a health check: the port is the one that is named.
FIXED_PORT = "USE_FIXED_PORT"
_GATEWAY_API = "gateway.networking.k8s.io/v1"
_GKE_API = "networking.gke.io/v1"
# Streams are as long as their answers.
_ROUTE_TIMEOUT_S = 3600
# For answers that a pod still gives when it is taken out; the longest there is.
_DRAINING_S = 3600


def gateway(cluster: ClusterConfig) -> Json:
    """The load balancer. Plain HTTP, as the proxies speak: add TLS in an overlay."""
    listener: Json = {
        "allowedRoutes": {"namespaces": {"from": "Same"}},
        "name": "http",
        "port": 80,
        "protocol": "HTTP",
    }
    spec = {"gatewayClassName": cluster.gateway_class, "listeners": [listener]}
    return namespaced_object(cluster, _GATEWAY_API, "Gateway", cluster.name) | {"spec": spec}


def http_route(cluster: ClusterConfig, service: str) -> Json:
    """Routes everything that arrives at the load balancer to the gateways."""
    rule = {
        "backendRefs": [{"name": service, "port": SERVE_PORT}],
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "timeouts": {"request": f"{_ROUTE_TIMEOUT_S}s"},
    }
    spec: Json = {"parentRefs": [{"name": cluster.name}], "rules": [rule]}
    if cluster.hostname is not None:
        spec["hostnames"] = [cluster.hostname]
    return namespaced_object(cluster, _GATEWAY_API, "HTTPRoute", cluster.name) | {"spec": spec}


def load_balancer_policies(cluster: ClusterConfig, service: str) -> list[Json]:
    """Returns the policies that Google's load balancers need; none for another GatewayClass.

    Without them they check `/`, which needs a key, and find every gateway unhealthy; and they cut
    each answer after 30 s. Source: reference of GKE's gateway API and GKE's page on policies, read
    2026-11-22.
    """
    if not is_googles(cluster.gateway_class):
        return []
    target = {"group": "", "kind": "Service", "name": service}
    health = {
        "checkIntervalSec": 5,
        "config": {
            "httpHealthCheck": {
                "port": SERVE_PORT,
                # Without it the API server refuses a port.
                "portSpecification": FIXED_PORT,
                "requestPath": READY_PATH,
            },
            "type": "HTTP",
        },
        "healthyThreshold": 1,
        "timeoutSec": 2,
        "unhealthyThreshold": 2,
    }
    backend = {
        "connectionDraining": {"drainingTimeoutSec": _DRAINING_S},
        "timeoutSec": _ROUTE_TIMEOUT_S,
    }
    return [
        namespaced_object(cluster, _GKE_API, kind, cluster.name)
        | {"spec": {"default": settings, "targetRef": target}}
        for kind, settings in (("HealthCheckPolicy", health), ("GCPBackendPolicy", backend))
    ]


def is_googles(gateway_class: str) -> bool:
    """Returns whether GKE's own controller makes the load balancers of a GatewayClass."""
    return gateway_class.startswith("gke-")


def gateway_service(cluster: ClusterConfig) -> Json:
    """The Service of the gateways and of no other pod, for clients and load balancers.

    It is used beside a RayService as well: KubeRay's Service exists only once every first replica
    has had a slice, and most of its endpoints are hosts of slices, where nothing listens.
    """
    spec = {
        "ports": [{"name": "serve", "port": SERVE_PORT, "targetPort": SERVE_PORT}],
        "selector": component_labels(cluster, Component.GATEWAY),
    }
    return namespaced_object(cluster, "v1", "Service", serve_service(cluster)) | {"spec": spec}


def pod_monitors(values: Values) -> list[Json]:
    """Returns what Prometheus scrapes: provisioner, exporters, gateways, Ray's own metrics."""
    cluster = values.cluster
    # A host's chips are read while they are scraped, and within 0.8 of the timeout.
    chips = {
        "port": EXPORTER_PORT_NAME,
        "interval": "5s",
        "scrapeTimeout": "4s",
        "honorLabels": True,
    }
    ray = {"port": "metrics", "interval": "15s", "relabelings": [_NODE_TYPE]}
    engine_labels = component_labels(cluster, Component.ENGINE)
    head_labels = component_labels(cluster, Component.HEAD)
    in_ray = {
        "matchLabels": instance_labels(cluster),
        "matchExpressions": [{"key": "ray.io/cluster", "operator": "Exists"}],
    }
    rounds = {"port": "provisioner", "interval": "15s"}
    return [
        _pod_monitor(cluster, "slice-provisioner", {"matchLabels": head_labels}, rounds),
        _pod_monitor(cluster, "tpu-exporter", {"matchLabels": engine_labels}, chips),
        _gateway_monitor(values),
        _pod_monitor(cluster, "ray", in_ray, ray),
    ]


def _gateway_monitor(values: Values) -> Json:
    """Reads each gateway at its own port.

    Of a pod's ports as many answer as it has gateways, and no gateway answers at two, so nothing is
    counted twice. Without such ports one proxy is read, the head's: each proxy hands `/metrics` to
    any gateway, so through several one gateway's counters would be read several times.
    """
    cluster, own = values.cluster, values.app.gateway.metrics_ports
    page: Json = {"path": "/metrics", "interval": "10s"}
    if cluster.secrets.api_keys is not None:
        key = {"name": cluster.secrets.api_keys, "key": "metrics-key"}
        page["authorization"] = {"type": "Bearer", "credentials": key}
    component = Component.GATEWAY if own else Component.HEAD
    ports = [gateway_port(number) for number in range(len(own))] or ["serve"]
    selector = {"matchLabels": component_labels(cluster, component)}
    endpoints = [page | {"port": port, "relabelings": [_HOST, _RUNNING]} for port in ports]
    return _pod_monitor(cluster, "gateway", selector, *endpoints)


# Alerts go by the pod that gateways are in; and the head is told from the other nodes of Ray.
_HOST = {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "host"}
# A pod that waits for its machine or for the head is no gateway that does not answer.
_RUNNING = {
    "sourceLabels": ["__meta_kubernetes_pod_phase"],
    "regex": "Running",
    "action": "keep",
}
_NODE_TYPE = {
    "sourceLabels": ["__meta_kubernetes_pod_label_ray_io_node_type"],
    "targetLabel": "node_type",
}


def _pod_monitor(cluster: ClusterConfig, name: str, selector: Json, *endpoints: Json) -> Json:
    api, full_name = "monitoring.coreos.com/v1", f"{cluster.name}-{name}"
    # As in deployments/prometheus: alerts and dashboards go by them.
    labels = [
        {"targetLabel": "job", "replacement": name},
        {"targetLabel": "installation", "replacement": cluster.name},
    ]
    spec = {
        "podMetricsEndpoints": [
            each | {"relabelings": [*labels, *each.get("relabelings", ())]} for each in endpoints
        ],
        "selector": selector,
    }
    return namespaced_object(cluster, api, "PodMonitor", full_name) | {"spec": spec}
