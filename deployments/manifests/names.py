"""Names our objects, and the labels by which they find each other. Pure."""

from enum import StrEnum
from typing import Any

from deployments.manifests.cluster_config import ClusterConfig

# KubeRay's on every pod of Ray, always `kuberay`: by it the TPU webhook finds the pods, and
# KubeRay's own head Service the head. A pod template that sets it hides its pods from both. Source:
# recorded from KubeRay 1.7.0 and kuberay-tpu-webhook 1.3.5 on 2026-11-22.
NAME_LABEL = "app.kubernetes.io/name"
PART_OF_LABEL = "app.kubernetes.io/part-of"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"

GATEWAY_GROUP = "gateway"
CONTROL_GROUP = "control"
SERVE_PORT = 8000
# Where a gateway says, through any proxy, whether its cluster can serve; no key is asked for.
READY_PATH = "/ready"
METRICS_PORT = 8080
DATA_FOLDER = "/data"  # of pods: where a bucket of weights is mounted
DASHBOARD_PORT = 8265
EXPORTER_PORT = 9450
# Ray's own port in the same pod is called `metrics`.
EXPORTER_PORT_NAME = "tpu-metrics"
REDIS_PORT = 6379
PROVISIONER_PORT = 9451  # its page for Prometheus, in the head pod
NETWORK_CLAIMS = "all-netdev"
RUN_FOLDER = "/var/run/slicewise"  # of a host's pod: where programs on the host find each other

Json = dict[str, Any]


class Component(StrEnum):
    """The role of a pod."""

    HEAD = "head"
    GATEWAY = "gateway"
    CONTROL = "control"  # slice replicas, directory, dashboard
    ENGINE = "engine"  # a host of a slice
    REDIS = "redis"  # only where it is the cluster's own


def component_labels(cluster: ClusterConfig, component: Component) -> dict[str, str]:
    """The labels of a component's pods, by which our selectors find them."""
    return instance_labels(cluster) | {COMPONENT_LABEL: component.value}


def instance_labels(cluster: ClusterConfig) -> dict[str, str]:
    """The labels of all pods of one installation."""
    return {PART_OF_LABEL: "slicewise", INSTANCE_LABEL: cluster.name}


def namespaced_object(cluster: ClusterConfig, api_version: str, kind: str, name: str) -> Json:
    """An object in the namespace of the installation, with its labels and without a spec."""
    metadata = {"labels": instance_labels(cluster), "name": name, "namespace": cluster.namespace}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def service_account(cluster: ClusterConfig, component: Component) -> str:
    """The Kubernetes service account of a component's pods."""
    return f"{cluster.name}-{component.value}"


def priority_class(cluster: ClusterConfig, component: Component) -> str:
    """The PriorityClass of a component's pods."""
    kind = "engine" if component == Component.ENGINE else "control"
    return f"{cluster.name}-{kind}"


def gateway_port(number: int) -> str:
    """The name of a port at which a gateway answers for itself; they count from 0."""
    return f"gateway-{number}"


def redis_name(cluster: ClusterConfig) -> str:
    """The name of the cluster's own Redis, and of the Service that leads to it."""
    return f"{cluster.name}-redis"


def serve_service(cluster: ClusterConfig) -> str:
    """The name of the Service that leads to the gateways, and to no other pod."""
    return f"{cluster.name}-gateways"


def kuberay_services(rayservice: str) -> frozenset[str]:
    """The names of the Services that KubeRay makes for a RayService, and points where it likes.

    They come once the application runs, which is once every first replica has had a slice; and
    every worker is behind the second, hosts of slices included. Source: recorded from KubeRay 1.7.0
    on 2026-11-22.
    """
    return frozenset({f"{rayservice}-head-svc", f"{rayservice}-serve-svc"})
