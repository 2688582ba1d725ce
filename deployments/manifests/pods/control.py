"""Renders the pods off TPU hosts: head, gateways, control processes. Pure."""

import math
import shlex

from deployments.manifests.cluster_config import ClusterConfig
from deployments.manifests.control_pool import num_control_pods
from deployments.manifests.hosts.environment import reconnect
from deployments.manifests.names import (
    DASHBOARD_PORT,
    METRICS_PORT,
    PROVISIONER_PORT,
    READY_PATH,
    SERVE_PORT,
    Component,
    Json,
    component_labels,
    gateway_port,
)
from deployments.manifests.pods.environment import TOKEN_KEY, from_secret, secret_volumes
from deployments.manifests.pods.parts import (
    agent_ready,
    container_security,
    control_spec,
    memory_volume,
    mount_bucket,
    pod_template,
    ray_container,
    ready,
    size_of,
)
from deployments.manifests.slice_groups import NODE_END_S
from deployments.manifests.values import Values
from serving.config.slice_settings import longest_replica_stop_s

_RAY_FOLDER = "/tmp/ray"  # in the pod, where Ray's processes find each other
# KubeRay's own name for it: of another one it makes a second, for the autoscaler beside the head
# alone. Source: KubeRay 1.7.0 `common/pod.go`, read 2026-11-23.
_RAY_VOLUME = "ray-logs"
_GCS_PORT = 6379
# Nothing of the application is on it, so there is nothing to wait for but its own end.
_HEAD_GRACE_S = 120
# Serve ends a gateway whose node drains once another one has taken its place.
_SUCCESSOR_S = 120
CONTROL_NODES_MODULE = "deployments.start.control_nodes"
# Images of control pods come as late as the gateways' own, nodes may come minutes later. Then
# gateways begin, and control processes with them.
_CONTROL_PATIENCE_S = 300


def head_template(values: Values) -> Json:
    """The head, with the slice provisioner beside Ray."""
    cluster = values.cluster
    ports = {
        "gcs-server": _GCS_PORT,
        "dashboard": DASHBOARD_PORT,
        "metrics": METRICS_PORT,
        # Its proxy serves nobody but Prometheus.
        "serve": SERVE_PORT,
    }
    container = ray_container(values, "ray-head", cluster.images.cpu, size_of(cluster.head), ports)
    spec = control_spec(cluster, Component.HEAD, _HEAD_GRACE_S)
    # It patches worker groups, as Ray's autoscaler does.
    spec["automountServiceAccountToken"] = True
    spec |= {"containers": [container], "initContainers": [_provisioner(values)]}
    spec["volumes"] = [
        memory_volume("dshm", 4),
        {"name": _RAY_VOLUME, "emptyDir": {}},
        *secret_volumes(values),
    ]
    container["volumeMounts"] += [{"name": _RAY_VOLUME, "mountPath": _RAY_FOLDER}]
    return pod_template(cluster, Component.HEAD, spec)


def gateway_template(values: Values) -> Json:
    """Returns one gateway's pod: Serve's proxy and gateways.

    At its end all that is there has time to leave; it is gone as soon as that has.
    """
    cluster = values.cluster
    ports = {"serve": SERVE_PORT, "metrics": METRICS_PORT}
    # Each gateway's own page: Prometheus looks only at ports that are declared.
    ports |= {gateway_port(n): port for n, port in enumerate(values.app.gateway.metrics_ports)}
    size = size_of(cluster.gateway_pod)
    container = ray_container(values, "ray-worker", cluster.images.cpu, size, ports)
    container["env"] += reconnect(cluster)
    # Traffic goes where a proxy reaches a gateway, once its cluster has had an engine.
    container["readinessProbe"] = ready(READY_PATH, SERVE_PORT)
    spec = _leaving_spec(cluster, Component.GATEWAY, container, values.app.rollout.gateway_drain_s)
    spec["initContainers"] = [_wait_for_control(values)]
    spec["volumes"] = [memory_volume("dshm", 4), *secret_volumes(values)]
    template = pod_template(cluster, Component.GATEWAY, spec)
    if cluster.bucket is not None:
        mount_bucket(template, cluster.bucket)
    return template


def control_template(values: Values) -> Json:
    """Returns a pod of control processes: slice replicas, the directory, the dashboard.

    At its end they have time to hand over what they command; it is gone as soon as they have.
    """
    cluster = values.cluster
    size = size_of(cluster.control_pool)
    container = ray_container(
        values, "ray-worker", cluster.images.cpu, size, {"metrics": METRICS_PORT}
    )
    container["env"] += reconnect(cluster)
    # Serve starts a proxy there as well, which no Service leads to.
    container["readinessProbe"] = agent_ready()
    # The successor of a replica on a node that ends waits for its engine, so Serve stops the old
    # one as late as the node's deadline allows, which is this long before. Source: Ray 2.60
    # `serve/_private/deployment_state.py`, read 2026-11-23.
    leave_s = longest_replica_stop_s(values.app)
    spec = _leaving_spec(cluster, Component.CONTROL, container, leave_s)
    spec["volumes"] = [memory_volume("dshm", 1), *secret_volumes(values, is_gateway=False)]
    return pod_template(cluster, Component.CONTROL, spec)


def _leaving_spec(
    cluster: ClusterConfig, component: Component, container: Json, longest_s: float
) -> Json:
    """Returns the spec of pods on as many nodes as there are, whose end is told to Ray.

    What is on them is ended once it has a successor, and takes at most `longest_s` for that.
    """
    leave_s = math.ceil(longest_s) + _SUCCESSOR_S
    # A head that is away, as it may be in the same upgrade, is told once it is back.
    tell = f"until {_drain_command(leave_s)}; do sleep 5; done"
    container["lifecycle"] = _before_end(f"{tell}; sleep {leave_s}")
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": component_labels(cluster, component)},
    }
    spec = control_spec(cluster, component, leave_s + NODE_END_S)
    return spec | {"containers": [container], "topologySpreadConstraints": [spread]}


def _wait_for_control(values: Values) -> Json:
    """Returns the container that keeps a gateway's node out of Ray until control nodes are in it.

    Where the gateways' came first, every control process would be there, and stay.
    """
    cluster = values.cluster
    head = f"$RAYCLUSTER-head-svc:{_GCS_PORT}"
    # One may be away, and is while nodes are upgraded.
    count = num_control_pods(cluster, values.app) - 1
    wait = f"until ray health-check --address {head} >/dev/null 2>&1; do sleep 2; done"
    command = f'python -m {CONTROL_NODES_MODULE} "{head}" {count} {_CONTROL_PATIENCE_S}'
    # As KubeRay gives its own container that waits for the head. Source: recorded from KubeRay
    # 1.7.0 on 2026-11-22.
    size = {"cpu": "200m", "memory": "256Mi"}
    return {
        "name": "wait-for-control",
        "image": cluster.images.cpu,
        "command": ["/bin/sh", "-c", f"{wait}; exec {command}"],
        "env": _ray_client_environment(cluster),
        "resources": {"requests": dict(size), "limits": dict(size)},
        "securityContext": container_security(),
    }


def _ray_client_environment(cluster: ClusterConfig) -> list[Json]:
    """Returns what a container needs to ask its cluster's head."""
    field = "metadata.labels['ray.io/cluster']"
    return [
        {"name": "RAYCLUSTER", "valueFrom": {"fieldRef": {"fieldPath": field}}},
        {"name": "RAY_AUTH_MODE", "value": "token"},
        from_secret("RAY_AUTH_TOKEN", cluster.secrets.ray_token, TOKEN_KEY),
    ]


def _drain_command(deadline_s: int) -> str:
    """Returns what tells Ray in a pod that its node ends in so long: all that is there leaves."""
    return (
        "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION "
        f"--reason-message 'its pod is deleted' --deadline-remaining-seconds {deadline_s}"
    )


def _before_end(command: str) -> Json:
    """What a container does before it is ended; if its Ray node ends sooner, so does this."""
    return {"preStop": {"exec": {"command": ["/bin/sh", "-c", command]}}}


def _provisioner(values: Values) -> Json:
    cluster = values.cluster
    provision = (
        f"slicewise provision --namespace={cluster.namespace} "
        f'--raycluster="$RAYCLUSTER" --application={shlex.quote(values.application)} '
        f"--installation={cluster.name} --metrics-port={PROVISIONER_PORT}"
    )
    wait = (
        f"until ray health-check --address 127.0.0.1:{_GCS_PORT} >/dev/null 2>&1; do sleep 2; done"
    )
    size = {"cpu": "500m", "memory": "1Gi"}
    return {
        "name": "slice-provisioner",
        "image": cluster.images.cpu,
        # A sidecar, which Kubernetes restarts by itself; it restarts no container of a Ray pod.
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", f"{wait}; exec {provision}"],
        "env": _ray_client_environment(cluster),
        "ports": [{"containerPort": PROVISIONER_PORT, "name": "provisioner"}],
        "resources": {"requests": dict(size), "limits": dict(size)},
        "securityContext": container_security(),
        "volumeMounts": [{"name": _RAY_VOLUME, "mountPath": _RAY_FOLDER}],
    }
